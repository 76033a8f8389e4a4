"""Find the fastest way to train that fits: chunks, schedule, balance, and the mode of each stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ._candidate import Candidate, Space, by_seconds, candidate_of, lacking, simplicity, with_replay
from ._costs import Costs
from ._neighbours import descended, improved, shifted
from ._placed import PARTS, Objective, best_placed
from ._search_pieces import Pieces

NEAR = 0.05
"""Candidates that are slower than the fastest by no more than this share are as good; the simplest is taken."""

FINALISTS = 12
"""How many candidates are replayed, the fastest by the closed form."""

_HOPELESS = 1.3
"""Candidates slower by this factor by the closed form, which ignores that backwards may be split, are left out."""

_LITTLE = 0.02
"""By the closed form, what recomputing only some layers of a stage must save for that to be looked at."""

_REPAIRS = 8
_TRIES = 2  # of stages in part, where whole ones fit


def search(space: Space) -> list[Candidate]:
    """The ways to train that fit, the best first: the simplest of those near the fastest, then all by their time.

    The best is no slower than it would be if only whole stages could be computed again, or if balances were chosen by
    the closed form alone.
    """
    found = by_seconds(candidates(space))
    if not found:
        return []
    whole = _replayed_first([each for each in found if not each.in_pieces])
    pieces = _replayed_first([each for each in found if each.in_pieces])
    by_closed_form = _simplest(by_seconds([*whole, *pieces]), _bound(whole))
    whole = _with_improved(space, whole)
    every = _with_improved(space, by_seconds([*whole, *pieces])) if pieces else whole
    best = _simplest(every, min(by_closed_form.seconds, _bound(whole)))
    return [best, *(each for each in every if each is not best)]


def _with_improved(space: Space, found: Sequence[Candidate]) -> list[Candidate]:
    """These, and better balances of the simplest and of the fastest of them, if there are any."""
    starts = {id(each): each for each in (found[0], _simplest(found, math.inf))} if found else {}
    nearby = [improved(space, each) for each in starts.values()]
    return by_seconds([*found, *(each for each in nearby if id(each) not in starts)])


def _bound(found: Sequence[Candidate]) -> float:
    """The seconds of the simplest of those near the fastest, if there are any."""
    return _simplest(found, math.inf).seconds if found else math.inf


def _replayed_first(found: Sequence[Candidate]) -> list[Candidate]:
    """The first ones, by what a replay of them takes."""
    return by_seconds(map(with_replay, found[:FINALISTS]))


def _simplest(found: Sequence[Candidate], most: float) -> Candidate:
    """The simplest of those near the fastest, which comes first, that take so many seconds at most.

    Of the same chunks and schedule the faster one is simple enough: others compute more again than they have to.
    """
    limit = min(found[0].seconds * (1 + NEAR), most)
    return min(
        (each for each in found if each.seconds <= limit), key=lambda each: (*simplicity(each)[:2], each.seconds)
    )


def candidates(space: Space) -> Iterator[Candidate]:
    """For each number of chunks and each schedule the best balance and modes that fit, with seconds by a closed form.

    They come in the order of their seconds with unlimited memory. Where even those are much more than the seconds of
    one that fits, the rest is left out.
    """
    fastest = math.inf
    for free in by_seconds(_free(space)):
        if free.seconds > fastest * _HOPELESS:
            return
        short = space.is_bounded and lacking(space, free)
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
    # Nothing that fits is faster than what would be done with unlimited memory.
    promising = whole is None or free.seconds < min(whole.seconds / (1 + _LITTLE), fastest * (1 + 2 * NEAR))
    if space.pieces and promising:
        best = _in_pieces(space, free, whole)
        if best is not None and best.in_pieces and (whole is None or best.seconds < whole.seconds):
            yield best


def _in_pieces(space: Space, free: Candidate, whole: Candidate | None) -> Candidate | None:
    """The best that fits of stages that are recomputed in part.

    The balances looked at are the best with unlimited memory, that of whole stages, and one for stages of which
    quarters are recomputed. From the best of these, layers move away from the slowest stage as long as that is faster.
    """
    ways = Pieces(free.costs, free.schedule, space.memory)

    def at(sizes: tuple[int, ...]) -> Candidate | None:
        found, short = ways.of(sizes)
        each = None if short else candidate_of(space, free.costs, free.schedule, sizes, found)
        return None if each is None or lacking(space, each) else each

    starts = [
        free.sizes,
        *([whole.sizes] if whole else []),
        *_by_parts(space, free, ways, _TRIES if whole else _REPAIRS),
    ]
    found = by_seconds(filter(None, map(at, dict.fromkeys(starts))))
    return descended(found[0], lambda best: filter(None, map(at, _eased(best)))) if found else None


def _by_parts(space: Space, free: Candidate, ways: Pieces, tries: int) -> list[tuple[int, ...]]:
    """A balance for stages of which quarters are recomputed, if one is found that fits."""

    def placed(rooms: Rooms) -> tuple[int, ...] | None:
        found = best_placed(space, free.costs, free.schedule, rooms, "bottleneck", parts=PARTS)
        return None if found is None else found[0]

    found = _repaired(space.memory, placed, lambda sizes: ways.of(sizes)[1], tries)
    return [] if found is None else [found[0]]


def _eased(candidate: Candidate) -> Iterator[tuple[int, ...]]:
    """The balances in which the slowest stage has given a layer to one beside it."""
    sizes = candidate.sizes
    times = [cost.forward + cost.backward for cost in candidate.costs.stage_costs(sizes, candidate.modes)]
    slowest = times.index(max(times))
    return (others for others in shifted(sizes) if others[slowest] < sizes[slowest])


def _free(space: Space) -> Iterator[Candidate]:
    """The best balance for each number of chunks, with any amount of memory."""
    for chunks in space.chunks:
        costs = space.measured.cut(chunks)
        placed = best_placed(space, costs)
        assert placed is not None  # without limits everything fits
        for schedule in space.schedules:
            yield candidate_of(space, costs, schedule, *placed)


def _fitting(space: Space, costs: Costs, schedule: str) -> Candidate | None:
    """The best that fits."""

    def placed(rooms: Rooms, objective: Objective) -> Candidate | None:
        found = best_placed(space, costs, schedule, rooms, objective)
        return None if found is None else candidate_of(space, costs, schedule, *found)

    # The slowest stage alone is found several times as fast as the makespan.
    found = _repaired(space.memory, lambda rooms: placed(rooms, "bottleneck"), lambda each: lacking(space, each))
    if found is None:
        return None
    better = placed(found[1], "makespan")
    return found[0] if better is None or lacking(space, better) else better


Rooms = Sequence[int | None]
Found = TypeVar("Found")


def _repaired(
    memory: Rooms,
    place: Callable[[Rooms], Found | None],
    short: Callable[[Found], dict[int, int]],
    tries: int = _REPAIRS,
) -> tuple[Found, Rooms] | None:
    """What ``place`` finds that fits, and the memory with which it did; None if it finds nothing, or nothing that fits.

    Sums over layers are exact in :func:`blockpartition.place`, but the peak of a stage is a maximum over its layers.
    So stages begin with all of their memory, and where the peak does not fit that much is taken from them.

    Args:
        memory: what each device may hold.
        place: finds something for less or as much.
        short: the bytes that devices are short of for what was found.
        tries: how often.
    """
    rooms = memory
    for _ in range(tries):
        found = place(rooms)
        if found is None:
            return None
        lacks = short(found)
        if not lacks:
            return found, rooms
        rooms = [None if room is None else room - lacks.get(j, 0) for j, room in enumerate(rooms)]
        if any(room is not None and room < 0 for room in rooms):
            return None
    return None
