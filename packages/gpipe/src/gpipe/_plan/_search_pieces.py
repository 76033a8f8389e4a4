"""Which layers of a stage to compute again, so that it fits and as little as possible is computed twice.

A stage is cut into runs of layers, of which every other one is recomputed. The bytes that a micro-batch keeps on the
stage and the seconds that it takes are sums over runs. So of all cuts those are kept to which no other one is superior
in both, as for a knapsack. Long runs keep fewer inputs, but need more memory at once while they are recomputed. So
there is such a front for each of several greatest lengths of runs, and in each the fastest cut that fits is found by
bisection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from profiler import LayerProfile

from ..schedule._flags import StageMode, mode_of
from ..timeline._kept import kept_bytes
from ._costs import Costs

UNITS = 12
"""A stage of more layers is cut between groups of layers, of which there are so many."""

LENGTHS = (1, 3, UNITS)
"""The greatest lengths of recomputed runs, in groups."""

KEPT = 12
"""How many cuts of a front are kept at each group."""


Figures = tuple[float, int, int, int, int]


class Cut(NamedTuple):
    """A way to cut a stage into runs.

    Attributes:
        seconds: that a micro-batch takes longer than without recomputation.
        held: bytes that it keeps.
        flags: for each layer whether it is recomputed.
    """

    seconds: float
    held: int
    flags: tuple[bool, ...]


def cuts(layers: Sequence[LayerProfile], action: float) -> list[list[Cut]]:
    """The front of cuts for each of :data:`LENGTHS`: the fastest first, and each keeps less than the one before.

    Args:
        layers: of the stage.
        action: seconds that the engine adds to a piece.
    """
    ends = _groups(len(layers))
    lengths = [length for k, length in enumerate(LENGTHS) if not k or LENGTHS[k - 1] < len(ends) - 1]
    return [_front(layers, ends, length, action) for length in lengths]


def _groups(layers: int) -> list[int]:
    """Where groups of layers begin, and the end of the last."""
    count = min(layers, UNITS)
    return [layers * k // count for k in range(count + 1)]


def _front(layers: Sequence[LayerProfile], ends: Sequence[int], length: int, action: float) -> list[Cut]:
    kept = [kept_bytes(layers[a:b]) for a, b in pairwise(ends)]
    forward = [0.0, *accumulate(layer.forward_seconds or 0.0 for layer in layers)]
    # For each number of groups: the cuts of so many whose last group is kept, and those that end with a recomputed run.
    whole: list[list[Cut]] = [[Cut(0.0, 0, ())]]
    again: list[list[Cut]] = [[]]
    for b in range(1, len(ends)):
        size = ends[b] - ends[b - 1]
        plain = [Cut(s, h + kept[b - 1], f + (False,) * size) for s, h, f in whole[-1]]
        # A piece more is more for the engine, in the forward and in the backward.
        plain += [Cut(s + 2 * action, h + kept[b - 1], f + (False,) * size) for s, h, f in again[-1]]
        runs = []
        sent = min(layers[ends[b] - 1].output_bytes, kept_bytes(layers[ends[max(0, b - length)] : ends[b]]))
        for a in range(max(0, b - length), b):
            seconds = forward[ends[b]] - forward[ends[a]] + (3 if a else 1) * action
            flags = (True,) * (ends[b] - ends[a])
            runs += [Cut(s + seconds, h + sent, f + flags) for s, h, f in whole[a]]
        whole.append(_undominated(plain))
        again.append(_undominated(runs))
    return _undominated([*whole[-1], *again[-1]], most=2 * KEPT)


def _undominated(found: list[Cut], most: int = KEPT) -> list[Cut]:
    kept: list[Cut] = []
    for each in sorted(found):
        if not kept or each.held < kept[-1].held:
            kept.append(each)
    step = max(1.0, (len(kept) - 1) / (most - 1))
    return kept if len(kept) <= most else [kept[round(k * step)] for k in range(most)]


class Pieces:
    """Finds the fastest modes with which stages fit.

    Args:
        costs: of micro-batches of one size.
        schedule: its name.
        rooms: what each device may hold.
    """

    def __init__(self, costs: Costs, schedule: str, rooms: Sequence[int | None]) -> None:
        self._costs = costs
        self._schedule = schedule
        self._rooms = rooms
        self._split = range(len(rooms)) if schedule == "zero_bubble" else ()
        self._known: dict[tuple[Figures, ...], list[list[Cut]]] = {}
        self._modes: dict[tuple[int, int, int], tuple[StageMode, int]] = {}

    def of(self, sizes: Sequence[int]) -> tuple[tuple[StageMode, ...], dict[int, int]]:
        """The fastest modes of stages of these sizes; and which do not fit, with the bytes that they are short."""
        found = [self._mode(j, sizes) for j in range(len(sizes))]
        return tuple(mode for mode, _ in found), {j: short for j, (_, short) in enumerate(found) if short > 0}

    def _mode(self, j: int, sizes: Sequence[int]) -> tuple[StageMode, int]:
        key = j, sum(sizes[:j]), sizes[j]
        if key not in self._modes:
            room = self._rooms[j]
            self._modes[key] = ("never", 0) if room is None else self._quickest(j, sizes, room)
        return self._modes[key]

    def _quickest(self, j: int, sizes: Sequence[int], room: int) -> tuple[StageMode, int]:
        """The fastest mode with which stage j fits and 0; if none does, the one that is short of the fewest bytes."""

        def lack(mode: StageMode) -> int:
            return self._costs.bytes_of(j, sizes, mode, self._schedule, self._split).total - room

        nearest: tuple[int, StageMode] = (lack("never"), "never")
        if nearest[0] <= 0:
            return "never", 0
        fitting: list[tuple[float, StageMode]] = []
        for front in self._cuts(j, sum(sizes[:j]), sizes[j]):
            low, high = 0, len(front)
            while low < high:  # a later cut keeps less
                middle = (low + high) // 2
                mode = mode_of(front[middle].flags)
                short = lack(mode)
                nearest = min(nearest, (short, mode), key=lambda each: each[0])
                if short <= 0:
                    fitting.append((front[middle].seconds, mode))
                    high = middle
                else:
                    low = middle + 1
        return (min(fitting, key=lambda each: each[0])[1], 0) if fitting else (nearest[1], nearest[0])

    def _cuts(self, j: int, first: int, size: int) -> list[list[Cut]]:
        layers = self._costs.profiles[j].layers[first : first + size]
        key = tuple(_alike(layers))
        if key not in self._known:
            self._known[key] = cuts(layers, self._costs.measured.action)
        return self._known[key]


def _alike(layers: Sequence[LayerProfile]) -> Iterator[Figures]:
    """The figures that cuts depend on; stages of equal layers share their cuts."""
    for layer in layers:
        yield (
            layer.forward_seconds or 0.0,
            layer.saved_bytes,
            layer.output_bytes,
            layer.freed_bytes,
            layer.passing_bytes,
        )
