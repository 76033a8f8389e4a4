"""Search for the fastest configuration that fits: chunks, schedule, balance, and the mode of each stage.

For each number of chunks and each schedule, dynamic programming finds the balance whose slowest stage is fastest. A
local search then moves single layers to nearby stages, or changes the option of a stage, while a replay gets faster.

The search does not cover more than two stages per device, looped_bfs and dualpipev, stages that take unequal parts of
their device's memory (unless that alone is searched, and nothing fits), several devices per stage, or all orders of
many devices that differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, permutations

from blockpartition import partition

from .._cached_property import cached_property
from ..schedule import SPLITTING
from ._arguments import OFFLOAD
from ._candidate import Candidate, SearchSpace, build_candidate, by_seconds
from ._costs import Costs, bounds
from ._options import Options, StageOption

NEAR = 0.01
"""Candidates slower than the fastest by at most this share count as equal, and the simplest is chosen."""

REPLAYED = 300_000
"""The most actions to replay in a local search, for one schedule and number of chunks."""

_LOADED = 15_000
"""The same for stages on the host, where a replay also inserts loads, and all balances take about as long."""

ENOUGH = 100
"""The most micro-batches per stage to search. More of them save 1 % at most."""

_MARGIN = 0.9
"""The least time of the best balance, relative to the balance whose slowest stage is fastest."""

_WIDER = (1.05, 1.25, 2.0, 1e9)
"""Limits for the slowest stage, relative to an even share of the work, tried until a balance is found."""

_NEARBY = 2
"""A layer moves by at most this many stages at once."""

Sizes = tuple[int, ...]


def search(spaces: Sequence[SearchSpace]) -> list[Candidate]:
    """Return the best candidate, then the best per number of chunks and schedule, sorted by time.

    The best is the simplest within :data:`NEAR` of the fastest: with the fewest stages, then the fewest chunks, then
    the simplest schedule. If none fits, return only the closest one with the placement of the last space.
    """
    found = by_seconds(candidates(spaces))
    if not found:
        # One may still fit if the stages of a device take unequal parts of its memory.
        last = [each for each in spaces if each.measured.placement == spaces[-1].measured.placement]
        return [min(((space, nearest(space)) for space in last), key=lambda pair: pair[0].compute_share(pair[1]))[1]]
    near = [each for each in found if each.seconds <= found[0].seconds * (1 + NEAR)]
    best = min(near, key=lambda each: (*each.simplicity, each.seconds))
    return [best, *(each for each in found if each is not best)]


def candidates(spaces: Sequence[SearchSpace]) -> Iterator[Candidate]:
    """Yield the best candidate that fits per number of chunks and schedule, unless it cannot be the fastest."""
    every = [options for space in spaces for m in space.chunks for options in _options(space, m)]
    fastest = math.inf
    for least, options in sorted(((_least(each), each) for each in every), key=lambda pair: pair[0]):
        space = options.space
        if least > fastest:
            return
        if fastest < math.inf and options.costs.chunks > ENOUGH * len(space.memory):
            continue
        found = find_best(options)
        # Without split backwards it equals another schedule, which is searched too unless only this is requested.
        if found is not None and (found.split or found.schedule not in SPLITTING or len(space.schedules) == 1):
            fastest = min(fastest, found.seconds)
            yield found


def _options(space: SearchSpace, chunks: int) -> Iterator[Options]:
    costs = space.measured.cut(chunks)
    return (Options(space, costs, name) for name in space.schedules)


def _least(options: Options) -> float:
    """Return an approximate lower bound of the seconds of a step."""
    # The bound ignores memory limits.
    costs, modes = options.costs, [options.space.modes[0]] * options.costs.measured.stages
    return _MARGIN * build_candidate(costs, options.schedule, even(costs)[0], modes).seconds


def even(costs: Costs) -> tuple[Sizes, float]:
    """Return the balance whose slowest stage is fastest if memory has no limits, and the seconds of that stage."""
    measured, work = costs.measured, costs.work()
    if {*measured.speeds} <= {1.0}:
        found = partition(work, measured.stages)
        return found.sizes, float(found.bottleneck)
    total = [*accumulate(work, initial=0.0)]

    def seconds(j: int, first: int, end: int) -> float:
        return (total[end] - total[first]) / measured.speed(j)

    sizes = divide_layers([0.0] * len(total), measured.stages, seconds, math.inf)
    assert sizes is not None
    return sizes, max(seconds(j, *own) for j, own in enumerate(bounds(sizes)))


def find_best(options: Options) -> Candidate | None:
    """Return the fastest candidate that a local search finds from a few starts; None if nothing fits."""
    found = list[Candidate]()
    for each in _starts(options):
        sizes = _find_balance(each)
        if sizes is not None and (start := _LazyCandidate.of(each, sizes)).candidate.fits_host:
            found.append(start.improved().candidate)
            if {*start.candidate.modes} == {"never"}:
                break  # other starts are the same
    return min(found, key=lambda candidate: candidate.seconds, default=None)


def _starts(options: Options) -> Iterator[Options]:
    """Yield the options of stages where local searches start.

    Single changes do not always lead from stages that all offload to stages that all recompute.
    """
    modes = options.space.modes
    if OFFLOAD in modes and len(modes) > 1:
        space = replace(options.space, modes=[mode for mode in modes if mode != OFFLOAD])
        yield Options(space, options.costs, options.schedule)
    yield options


class _LazyCandidate:
    """A balance with an option per stage. Its seconds are computed lazily, by a replay."""

    def __init__(self, options: Options, sizes: Sizes, chosen: Sequence[StageOption]) -> None:
        self._options, self._sizes, self._chosen = options, sizes, chosen
        self.bound = _bound(chosen, options.costs.hops(sizes)) if len(chosen) == len(sizes) else math.inf

    @classmethod
    def of(cls, options: Options, sizes: Sizes) -> _LazyCandidate:
        """Choose the fitting option with the least work for each stage. A stage without one is omitted."""
        return cls(
            options, sizes, [own for j, each in enumerate(bounds(sizes)) for own in options.fitting(j, *each)[:1]]
        )

    @cached_property
    def candidate(self) -> Candidate:
        options = self._options
        return build_candidate(options.costs, options.schedule, self._sizes, [option.mode for option in self._chosen])

    @property
    def seconds(self) -> float:
        """The seconds of a step; infinite if the host lacks memory."""
        return self.candidate.seconds if self.candidate.fits_host else math.inf

    def improved(self) -> _LazyCandidate:
        """Return the fastest one that a local search reaches by single changes."""
        costs = self._options.costs
        most = _LOADED if costs.measured.host.parameters else REPLAYED
        best, left = self, most // (2 * len(self._sizes) * costs.chunks)
        while left > 0:
            near = sorted((each for each in best.near() if each.bound < best.seconds), key=lambda each: each.bound)
            left -= len(near[:left])
            faster = min(near[: max(1, left)], key=lambda each: each.seconds, default=best)
            if faster.seconds >= best.seconds:
                break
            best = faster
        return best

    def near(self) -> Iterator[_LazyCandidate]:
        """Yield the neighbors: one layer on a different stage, or a different option of one stage."""
        for sizes in shift_layers(self._sizes):
            yield _LazyCandidate.of(self._options, sizes)
        for j, own in enumerate(bounds(self._sizes)):
            for option in self._options.fitting(j, *own):
                if option is not self._chosen[j]:
                    yield _LazyCandidate(
                        self._options, self._sizes, [*self._chosen[:j], option, *self._chosen[j + 1 :]]
                    )


def _bound(chosen: Sequence[StageOption], hops: Sequence[float]) -> float:
    """Return a lower bound for any schedule: a stage's work, with the path to it and back from it."""
    ahead, behind, least = 0.0, 0.0, 0.0
    for option, hop in zip(chosen, hops, strict=True):
        ahead += hop
        behind += hop
        least = max(least, ahead + option.busy + (0.0 if option.splits else behind))
        ahead += option.cost.forward
        behind += option.cost.backward if not option.splits else 0.0
    return least


def shift_layers(sizes: Sizes) -> Iterator[Sizes]:
    """Yield all sizes with one layer moved to a nearby stage. The layers in between shift by one stage.

    >>> list(shift_layers((2, 1, 2)))
    [(3, 1, 1), (1, 2, 2), (2, 2, 1), (1, 1, 3)]
    """
    for j, k in permutations(range(len(sizes)), 2):
        if sizes[k] > 1 and abs(j - k) <= _NEARBY:
            yield tuple(size + (i == j) - (i == k) for i, size in enumerate(sizes))


def _find_balance(options: Options) -> Sizes | None:
    """Return the feasible balance whose slowest stage is fastest; None if nothing fits."""

    def busy(j: int, first: int, end: int) -> float:
        found = options.fitting(j, first, end)
        return found[0].busy if found else math.inf

    measured, m, work = options.costs.measured, options.costs.chunks, options.costs.work()
    free, slowest = even(options.costs)
    if options.space.rooms == [None] * measured.stages:
        return free
    # The work of all later layers, a lower bound for any balance of them.
    fastest = max(measured.speeds, default=1.0)
    behind = [m * size / fastest for size in accumulate(reversed(work), initial=0.0)][::-1]
    least = m * (slowest + 2 * measured.action)
    found = (divide_layers(behind, measured.stages, busy, least * wider) for wider in _WIDER)
    return next((sizes for sizes in found if sizes is not None), None)


Weight = Callable[[int, int, int], float]
"""The weight of stage j with a range of layers; infinite if these layers, or more of them, do not fit."""


def divide_layers(behind: Sequence[float], stages: int, weight: Weight, most: float) -> Sizes | None:
    """Return the sizes whose heaviest stage is lightest and weighs at most ``most``; None if there are none.

    Args:
        behind: for each layer, and the end, a lower bound of the total weight of stages with it and all later layers.
        stages: the number of stages.
        weight: the weight of a stage, which grows with its layers.
        most: the limit for each stage.
    """
    layers = len(behind) - 1
    best: dict[int, tuple[float, Sizes]] = {0: (0.0, ())}
    for left in reversed(range(stages)):
        found: dict[int, tuple[float, Sizes]] = {}
        for first, (heaviest, sizes) in best.items():
            for end in range(first + 1 if left else layers, layers - left + 1):
                if behind[end] > most * left:
                    continue  # the later stages could not have the rest
                own = max(heaviest, weight(len(sizes), first, end))
                if own > most:
                    break
                if end not in found or own < found[end][0]:
                    found[end] = own, (*sizes, end - first)
        best = found
    return best[layers][1] if layers in best else None


def nearest(space: SearchSpace) -> Candidate:
    """Return the candidate whose largest share of a stage's memory is smallest."""
    # The smallest micro-batches take the least memory, or the largest if most of it does not depend on rows.
    chunks = sorted({space.chunks[0], space.chunks[-1]})
    return min((least_memory(options) for m in chunks for options in _options(space, m)), key=space.compute_share)


def least_memory(options: Options) -> Candidate:
    """Return this candidate for one number of chunks and one schedule."""
    layers, stages = options.costs.measured.layers, options.costs.measured.stages

    def share(j: int, first: int, end: int) -> float:
        return options.least(j, first, end).share

    even = tuple(layers * (j + 1) // stages - layers * j // stages for j in range(stages))
    most = max(share(j, *own) for j, own in enumerate(bounds(even)))
    sizes = divide_layers([0.0] * (layers + 1), stages, share, most) or even
    return _LazyCandidate(options, sizes, [options.least(j, *own) for j, own in enumerate(bounds(sizes))]).candidate
