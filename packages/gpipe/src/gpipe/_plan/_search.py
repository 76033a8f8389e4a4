"""Find the fastest way to train that fits: chunks, schedule, balance, and the mode of each stage.

For each number of chunks and each schedule this begins with the balance of the least slowest stage, which dynamic
programming finds. From there a layer goes to another stage nearby, or a stage takes another option, as long as a replay
is faster.

Not searched: more than two stages on a device, looped_bfs and dualpipev, stages of a device that take unequal parts of
its memory (unless that alone is searched, and nothing fits), more than one device for a stage, and devices in another
order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, permutations

from blockpartition import partition

from ..schedule import SPLITTING
from ._candidate import Candidate, Space, by_seconds, candidate_of
from ._costs import bounds
from ._options import Options, StageOption

NEAR = 0.01
"""Candidates that are slower than the fastest by no more than this share are as good; the simplest is taken."""

REPLAYED = 300_000
"""The most actions that are replayed to improve the balance under one schedule and number of chunks."""

ENOUGH = 100
"""Beyond so many micro-batches for each stage, more of them save a hundredth at most, and are not looked at."""

_MARGIN = 0.9
"""How much faster the best balance may be than the one with the least slowest stage."""

_WIDER = (1.05, 1.25, 2.0, 1e9)
"""How much longer than an even share of the work the slowest stage may take, until a balance is found."""

_NEARBY = 2
"""A layer goes to a stage so many stages away, at most."""

Sizes = tuple[int, ...]


def search(spaces: Sequence[Space]) -> list[Candidate]:
    """The best candidate of all, then the best for each number of chunks and each schedule, by their time.

    The best has the fewest stages, then the fewest chunks, then the simplest schedule, within :data:`NEAR` of the
    fastest. If none is found, only the one of the last space that comes nearest, whether it fits or not.
    """
    found = by_seconds(candidates(spaces))
    if not found:
        # What fits into no equal parts of the memory of devices may fit into unequal ones.
        return [nearest(spaces[-1])]
    near = [each for each in found if each.seconds <= found[0].seconds * (1 + NEAR)]
    best = min(near, key=lambda each: (*each.simplicity, each.seconds))
    return [best, *(each for each in found if each is not best)]


def candidates(spaces: Sequence[Space]) -> Iterator[Candidate]:
    """The best that fits for each number of chunks and each schedule, unless it cannot be the fastest."""
    ways = [options for space in spaces for m in space.chunks for options in _options(space, m)]
    fastest = math.inf
    for least, options in sorted(((_least(each), each) for each in ways), key=lambda pair: pair[0]):
        space = options.space
        if least > fastest:
            return
        if fastest < math.inf and options.costs.chunks > ENOUGH * len(space.memory):
            continue
        found = best_of(options)
        # One that splits nothing is another one, which is searched too unless this one alone was asked for.
        if found is not None and (found.split or found.schedule not in SPLITTING or len(space.schedules) == 1):
            fastest = min(fastest, found.seconds)
            yield found


def _options(space: Space, chunks: int) -> Iterator[Options]:
    costs = space.measured.cut(chunks)
    return (Options(space, costs, name) for name in space.schedules)


def _least(options: Options) -> float:
    """A lower bound of the seconds of a step, nearly."""
    # As if there were no limit of memory.
    costs, stages = options.costs, options.costs.measured.stages
    sizes, modes = partition(costs.work(), stages).sizes, [options.space.modes[0]] * stages
    return _MARGIN * candidate_of(costs, options.schedule, sizes, modes).seconds


def best_of(options: Options) -> Candidate | None:
    sizes = _placed(options)
    return None if sizes is None else _Way.of(options, sizes).improved().candidate


class _Way:
    """A balance with an option for each stage, which is replayed when its seconds are asked for."""

    def __init__(self, options: Options, sizes: Sizes, chosen: Sequence[StageOption]) -> None:
        self._options, self._sizes, self._chosen = options, sizes, chosen
        self.bound = _bound(chosen, options.costs.hops(sizes)) if len(chosen) == len(sizes) else math.inf

    @classmethod
    def of(cls, options: Options, sizes: Sizes) -> _Way:
        """With the option of each stage that has the least work; a stage that fits with none is left out."""
        return cls(
            options, sizes, [own for j, each in enumerate(bounds(sizes)) for own in options.fitting(j, *each)[:1]]
        )

    @cached_property
    def candidate(self) -> Candidate:
        options = self._options
        return candidate_of(options.costs, options.schedule, self._sizes, [option.mode for option in self._chosen])

    @property
    def seconds(self) -> float:
        return self.candidate.seconds

    def improved(self) -> _Way:
        """The fastest that is reached from here by single changes."""
        best, left = self, REPLAYED // (2 * len(self._sizes) * self._options.costs.chunks)
        while left > 0:
            near = sorted((each for each in best.near() if each.bound < best.seconds), key=lambda each: each.bound)
            left -= len(near[:left])
            faster = min(near[: max(1, left)], key=lambda each: each.seconds, default=best)
            if faster.seconds >= best.seconds:
                break
            best = faster
        return best

    def near(self) -> Iterator[_Way]:
        """Those with a layer on another stage, or another option of a stage."""
        for sizes in shifted(self._sizes):
            yield _Way.of(self._options, sizes)
        for j, own in enumerate(bounds(self._sizes)):
            for option in self._options.fitting(j, *own):
                if option is not self._chosen[j]:
                    yield _Way(self._options, self._sizes, [*self._chosen[:j], option, *self._chosen[j + 1 :]])


def _bound(chosen: Sequence[StageOption], hops: Sequence[float]) -> float:
    """A lower bound under any schedule: all work of a stage, between what comes before it and what follows."""
    ahead, behind, least = 0.0, 0.0, 0.0
    for option, hop in zip(chosen, hops, strict=True):
        ahead += hop
        behind += hop
        least = max(least, ahead + option.busy + (0.0 if option.splits else behind))
        ahead += option.cost.forward
        behind += option.cost.backward if not option.splits else 0.0
    return least


def shifted(sizes: Sizes) -> Iterator[Sizes]:
    """All sizes with one layer on another stage nearby; the layers between them move up.

    >>> list(shifted((2, 1, 2)))
    [(3, 1, 1), (1, 2, 2), (2, 2, 1), (1, 1, 3)]
    """
    for j, k in permutations(range(len(sizes)), 2):
        if sizes[k] > 1 and abs(j - k) <= _NEARBY:
            yield tuple(size + (i == j) - (i == k) for i, size in enumerate(sizes))


def _placed(options: Options) -> Sizes | None:
    """The balance with the least slowest stage that fits; None if none does."""

    def busy(j: int, first: int, end: int) -> float:
        found = options.fitting(j, first, end)
        return found[0].busy if found else math.inf

    stages, m, work = options.costs.measured.stages, options.costs.chunks, options.costs.work()
    free = partition(work, stages)
    if options.space.rooms == [None] * stages:
        return free.sizes
    # The work of later layers, below which no balance of these comes.
    behind = [m * size for size in accumulate(reversed(work), initial=0.0)][::-1]
    even = m * (free.bottleneck + 2 * options.costs.measured.action)
    found = (divided(behind, stages, busy, even * wider) for wider in _WIDER)
    return next((sizes for sizes in found if sizes is not None), None)


Weight = Callable[[int, int, int], float]
"""Of stage j with the layers from one to another; infinite if it cannot have them, nor more of them."""


def divided(behind: Sequence[float], stages: int, weight: Weight, most: float) -> Sizes | None:
    """The sizes of stages with the least heaviest one, which weighs at most ``most``; None if there are none.

    Args:
        behind: for each layer, and the end, what stages of it and all later ones weigh at least, together.
        weight: of a stage, which grows with its layers.
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


def nearest(space: Space) -> Candidate:
    """The candidate of which the stages need the least share of their memory."""
    # The smallest micro-batches take the least memory; the largest do where most of it does not depend on rows.
    chunks = sorted({space.chunks[0], space.chunks[-1]})
    return min((least_memory(options) for m in chunks for options in _options(space, m)), key=space.share_of)


def least_memory(options: Options) -> Candidate:
    """The same for one number of chunks and one schedule."""
    layers, stages = options.costs.measured.layers, options.costs.measured.stages

    def share(j: int, first: int, end: int) -> float:
        return options.least(j, first, end).share

    even = tuple(layers * (j + 1) // stages - layers * j // stages for j in range(stages))
    most = max(share(j, *own) for j, own in enumerate(bounds(even)))
    sizes = divided([0.0] * (layers + 1), stages, share, most) or even
    return _Way(options, sizes, [options.least(j, *own) for j, own in enumerate(bounds(sizes))]).candidate
