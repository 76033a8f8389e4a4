"""Find the fastest way to train that fits: chunks, schedule, balance, and the mode of each stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Literal

from blockpartition import Infeasible, Mode, Stage, place

from ..schedule import Kind, checkpoint_stops
from ..schedule._makespan import makespan
from ..schedule._named import lanes
from ..timeline._kept import shares
from ._arguments import SCHEDULES
from ._costs import Costs, Measured
from ._memory import DeviceBytes, held_by
from ._search_pieces import Pieces
from ._ways import Way, modes_of, way_of

NEAR = 0.05
"""Of ways to train that are within this share of the fastest, the simplest is taken."""

FINALISTS = 12
"""So many are replayed; the others are slower by the closed form."""

_HOPELESS = 1.3
"""So much slower by the closed form, which knows no split backwards, a way to train does not win the replay."""

_LITTLE = 0.02
"""For less, by the closed form, stages are not taken apart."""

PARTS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))
"""What of stages is computed again, while their balance is looked for."""

_GAP = 0.01
_REPAIRS = 8
_TRIES = 2  # where whole stages fit
_TICKS = 1e9  # a second, in the whole numbers that make `place` fast


@dataclass(frozen=True)
class Space:
    """What is searched.

    Attributes:
        measured: the costs.
        chunks: numbers of micro-batches.
        schedules: names.
        modes: those that each stage may have. Flags are of all layers, of which a stage has its own.
        memory: what each device may hold; None is any amount.
        pieces: whether only some layers of a stage may be computed again.
    """

    measured: Measured
    chunks: Sequence[int]
    schedules: Sequence[str]
    modes: Sequence[tuple[Way, ...]]
    memory: Sequence[int | None]
    pieces: bool = False

    @property
    def is_bounded(self) -> bool:
        """Whether memory can be short."""
        return any(size is not None for size in self.memory)


@dataclass(frozen=True)
class Candidate:
    """A way to train.

    Attributes:
        costs: of its micro-batches.
        schedule: its name.
        split: stages whose backward is split.
        sizes: layers of each stage.
        modes: of checkpointing, for each stage, or flags of its layers.
        bytes: what each device holds.
        seconds: of a step: by the closed form, or once it was replayed by that.
    """

    costs: Costs
    schedule: str
    split: tuple[int, ...]
    sizes: tuple[int, ...]
    modes: tuple[Way, ...]
    bytes: tuple[DeviceBytes, ...]
    seconds: float

    @property
    def chunks(self) -> int:
        return self.costs.chunks

    @property
    def fullest(self) -> int:
        """The bytes of the device that holds the most."""
        return max(each.total for each in self.bytes)

    @property
    def in_pieces(self) -> bool:
        """Whether only some layers of a stage are computed again."""
        return any(not isinstance(way, str) for way in self.modes)


def search(space: Space) -> list[Candidate]:
    """The ways to train that fit, the best first: the simplest of those near the fastest, then all by their time.

    The best is no slower than it would be if only whole stages could be computed again.
    """
    found = sorted(candidates(space), key=lambda each: each.seconds)
    whole = _replayed_first([each for each in found if not each.in_pieces])
    judged = sorted([*whole, *_replayed_first([each for each in found if each.in_pieces])], key=_seconds)
    if not judged:
        return []
    best = _simplest(judged, _simplest(whole, math.inf).seconds if whole else math.inf)
    return [best, *(each for each in judged if each is not best)]


def _replayed_first(found: Sequence[Candidate]) -> list[Candidate]:
    """The first ones, by what a replay of them takes."""
    return sorted((_judged(each) for each in found[:FINALISTS]), key=_seconds)


def _simplest(judged: Sequence[Candidate], most: float) -> Candidate:
    """The simplest of those near the fastest, which comes first, that take so many seconds at most.

    Of the same chunks and schedule the faster one is simple enough: others compute more again than they have to.
    """
    limit = min(judged[0].seconds * (1 + NEAR), most)
    return min(
        (each for each in judged if each.seconds <= limit), key=lambda each: (*simplicity(each)[:2], each.seconds)
    )


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds


def simplicity(candidate: Candidate) -> tuple[int, int, int]:
    """Less is simpler: chunks, then the schedule, then memory."""
    return candidate.chunks, SCHEDULES.index(candidate.schedule), candidate.fullest


def _judged(candidate: Candidate) -> Candidate:
    return replace(candidate, seconds=replayed(candidate))


def replayed(candidate: Candidate) -> float:
    """The seconds of a step, if every action takes what it costs."""
    costs, m = candidate.costs, candidate.chunks
    stages = costs.stage_costs(candidate.sizes, candidate.modes)
    steps = lanes(candidate.schedule, m, range(len(stages)), stops_of(candidate), candidate.split)
    seconds = [{kind: stage.seconds(kind) for kind in Kind} for stage in stages]
    pipeline = makespan(steps, m, seconds, costs.hops(candidate.sizes))
    return pipeline + costs.reduction(candidate.sizes) + costs.measured.step


def stops_of(candidate: Candidate) -> tuple[int, ...]:
    """The micro-batches that each stage checkpoints: those below."""
    return checkpoint_stops(modes_of(candidate.modes), candidate.chunks, len(candidate.modes))


def candidates(space: Space) -> Iterator[Candidate]:
    """For numbers of chunks and schedules the best balance and modes that fit, with seconds by a closed form.

    Those are the time of one micro-batch through all stages, and of the others through the slowest. The quickest if
    there was any amount of memory comes first. What would be much slower even so than one that fits is left out.
    """
    fastest = math.inf
    for free in sorted(_free(space), key=lambda each: each.seconds):
        if free.seconds > fastest * _HOPELESS:
            return
        short = space.is_bounded and _excess(space, free)
        every = _all_fitting(space, free, fastest) if short else [free]
        for found in every:
            # Zero bubble that splits nothing is 1F1B, which is among the others unless zero bubble alone was asked for.
            if found.split or found.schedule != "zero_bubble" or len(space.schedules) == 1:
                fastest = min(fastest, found.seconds)
                yield found


def _all_fitting(space: Space, free: Candidate, fastest: float) -> Iterator[Candidate]:
    """The best that fits of whole stages, and of stages in pieces if that is quicker."""
    whole = _fitting(space, free.costs, free.schedule)
    if whole is not None:
        yield whole
    # Nothing that fits is quicker than what would be done with any memory.
    promising = whole is None or free.seconds < min(whole.seconds / (1 + _LITTLE), fastest * (1 + 2 * NEAR))
    if space.pieces and promising:
        best = _in_pieces(space, free, whole)
        if best is not None and best.in_pieces and (whole is None or best.seconds < whole.seconds):
            yield best


def _in_pieces(space: Space, free: Candidate, whole: Candidate | None) -> Candidate | None:
    """The best that fits of stages that are computed again in part.

    Looked at are the balance that any memory would have, that of whole stages, and one for stages of which quarters are
    computed again; then layers move from the slowest stage as long as that helps.
    """
    ways = Pieces(free.costs, free.schedule, space.memory)

    def at(sizes: tuple[int, ...]) -> Candidate | None:
        found, short = ways.of(sizes)
        each = None if short else _candidate(space, free.costs, free.schedule, sizes, found)
        return None if each is None or _excess(space, each) else each

    starts = [
        free.sizes,
        *([whole.sizes] if whole else []),
        *_by_parts(space, free, ways, _TRIES if whole else _REPAIRS),
    ]
    best = min(filter(None, map(at, dict.fromkeys(starts))), key=_seconds, default=None)
    while best is not None:
        nearer = min(filter(None, map(at, _eased(best))), key=_seconds, default=best)
        if nearer.seconds >= best.seconds:
            break
        best = nearer
    return best


def _by_parts(space: Space, free: Candidate, ways: Pieces, tries: int) -> Iterator[tuple[int, ...]]:
    """A balance for stages of which quarters are computed again, if one is found that fits."""
    rooms = list(space.memory)
    for _ in range(tries):
        placed = _placed(space, free.costs, free.schedule, rooms, "bottleneck", parts=PARTS)
        if placed is None:
            return
        short = ways.of(placed[0])[1]
        if not short:
            yield placed[0]
            return
        rooms = [room and room - short.get(j, 0) for j, room in enumerate(rooms)]
        if min(room for room in rooms if room is not None) < 0:
            return


def _eased(candidate: Candidate) -> Iterator[tuple[int, ...]]:
    """The balances in which the slowest stage has given a layer to one beside it."""
    sizes = candidate.sizes
    times = [cost.forward + cost.backward for cost in candidate.costs.stage_costs(sizes, candidate.modes)]
    slowest = times.index(max(times))
    for other in (slowest - 1, slowest + 1):
        if 0 <= other < len(sizes) and sizes[slowest] > 1:
            moved = list(sizes)
            moved[slowest], moved[other] = moved[slowest] - 1, moved[other] + 1
            yield tuple(moved)


def _free(space: Space) -> Iterator[Candidate]:
    """The best balance for each number of chunks, with any amount of memory."""
    for chunks in space.chunks:
        costs = space.measured.cut(chunks)
        placed = _placed(space, costs)
        assert placed is not None  # without limits everything fits
        for schedule in space.schedules:
            yield _candidate(space, costs, schedule, *placed)


Placed = tuple[tuple[int, ...], tuple[Way, ...]]
Objective = Literal["bottleneck", "makespan"]


def _candidate(space: Space, costs: Costs, schedule: str, sizes: tuple[int, ...], modes: tuple[Way, ...]) -> Candidate:
    stages = costs.stage_costs(sizes, modes)
    split = costs.split(sizes, stages) if schedule == "zero_bubble" else ()
    times = [
        stage.forward + stage.backward + (stage.seconds(Kind.RECOMPUTE) if mode != "never" else 0.0)
        for stage, mode in zip(stages, modes_of(modes), strict=True)
    ]
    seconds = sum(times) + (costs.chunks - 1) * max(times) + 2 * sum(costs.hops(sizes))
    seconds += costs.reduction(sizes) + costs.measured.step
    needs = costs.device_bytes(sizes, modes, schedule, split)
    return Candidate(costs, schedule, split, sizes, modes, needs, seconds)


def _excess(space: Space, candidate: Candidate) -> dict[int, int]:
    """The bytes that devices are short of."""
    limits = enumerate(zip(candidate.bytes, space.memory, strict=True))
    return {j: need.total - room for j, (need, room) in limits if room is not None and need.total > room}


def _fitting(space: Space, costs: Costs, schedule: str) -> Candidate | None:
    """The best that fits.

    Sums over layers are exact in :func:`blockpartition.place`, but the peak of a stage is a maximum over its layers.
    So stages begin with all of their memory, and where the peak does not fit that much is taken from them.
    """
    rooms = list(space.memory)
    for _ in range(_REPAIRS):
        # The slowest stage alone is found several times as fast as the makespan.
        found = _in(space, costs, schedule, rooms, "bottleneck")
        if found is None:
            return None
        excess = _excess(space, found)
        if not excess:
            better = _in(space, costs, schedule, rooms, "makespan")
            fits = better is not None and not _excess(space, better)
            return better if fits else found
        for j, short in excess.items():
            room = rooms[j]
            assert room is not None
            rooms[j] = room - short
        if min(room for room in rooms if room is not None) < 0:
            return None
    return None


def _in(
    space: Space, costs: Costs, schedule: str, rooms: Sequence[int | None], objective: Objective
) -> Candidate | None:
    placed = _placed(space, costs, schedule, rooms, objective)
    return None if placed is None else _candidate(space, costs, schedule, *placed)


def _placed(
    space: Space,
    costs: Costs,
    schedule: str | None = None,
    rooms: Sequence[int | None] | None = None,
    objective: Objective = "makespan",
    parts: Sequence[Fraction] = (),
) -> Placed | None:
    """The balance and modes that are best by the closed form, or its slowest stage; None if nothing fits.

    Args:
        parts: more modes, in which that part of each layer is computed again.
    """
    stages = len(space.modes)
    limits = [None] * stages if rooms is None else list(rooms)
    allowed = [modes[:1] if rooms is None else modes for modes in space.modes]
    options = [
        Stage(capacity=room, modes=[*(_mode(costs, j, way) for way in ways), *(_partly(costs, j, p) for p in parts)])
        for j, (room, ways) in enumerate(zip(limits, allowed, strict=True))
    ]
    bounded = rooms is not None and schedule is not None
    split = range(stages) if schedule == "zero_bubble" else ()
    try:
        placed = place(
            [0] * costs.measured.layers,
            options,
            memory=costs.fixed_bytes() if bounded else None,
            activations=shares(costs.profiles[0].layers) if bounded else None,
            boundary=costs.incoming if bounded else None,
            in_flight=held_by(schedule, costs.chunks, stages, split) if bounded and schedule else None,
            objective=objective,
            microbatches=costs.chunks,
            gap=_GAP,
            transfer=_transfer(costs),
        )
    except Infeasible:
        return None
    ends = accumulate(placed.sizes)
    return placed.sizes, tuple(
        _own(ways, str(name), end - size, end)
        for ways, name, size, end in zip(allowed, placed.modes, placed.sizes, ends, strict=True)
    )


def _own(ways: Sequence[Way], name: str, first: int, end: int) -> Way:
    """What a stage of these layers has of the way of that name."""
    way = next((way for way in ways if str(way) == name), name)
    return way if isinstance(way, str) else way_of(way[first:end])


def _transfer(costs: Costs) -> list[int] | None:
    """What a cut after each layer costs, if links take time: that of the slowest, there and back."""
    outputs = [layer.output_bytes for layer in costs.profiles[0]]
    ticks = [round(2 * _TICKS * max(link(size) for link in costs.measured.links)) for size in outputs]
    return ticks[:-1] if any(ticks) else None


def _mode(costs: Costs, stage: int, way: Way) -> Mode:
    again = [way != "never"] * costs.measured.layers if isinstance(way, str) else way
    time = [round(_TICKS * seconds) for seconds in costs.work(stage, again)]
    kept = 1 if costs.measured.copied[stage] or way != "never" else 0
    if way == "never":
        return Mode("never", time=time, boundary=kept)
    if isinstance(way, str):
        return Mode(way, time=time, saved=0, transient=2 if way == "except_last" else 1, boundary=kept)
    layers = costs.profiles[0].layers
    saved = [
        (layer.output_bytes if follows else 0) if flag else share
        for layer, share, flag, follows in zip(layers, shares(layers), way, _followed(way), strict=True)
    ]
    return Mode(str(way), time=time, saved=saved, boundary=kept)


def _followed(flags: Sequence[bool]) -> list[bool]:
    """Of each layer, whether the next one keeps its input."""
    return [*(not flag for flag in flags[1:]), True]


def _partly(costs: Costs, stage: int, part: Fraction) -> Mode:
    """As if that part of each layer was computed again: what it left is its output then, and pieces come one by one."""
    layers = costs.profiles[0].layers
    never, always = (costs.work(stage, [again] * len(layers)) for again in (False, True))
    time = [round(_TICKS * (a + float(part) * (b - a))) for a, b in zip(never, always, strict=True)]
    saved = max(1, sum(shares(layers)))
    sent = Fraction(min(16 * sum(layer.output_bytes for layer in layers) // saved, 16), 16) / 2
    kept = 1 if costs.measured.copied[stage] else 0
    return Mode(str(part), time=time, saved=1 - part + part * sent, transient=part / 4, boundary=kept)
