"""Balances near one that was found: a layer on the other side of a cut, as long as that is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..schedule._flags import moved
from ._candidate import Candidate, Space, candidate_of, lacking, with_replay

MOST = 4096
"""Of stages² · chunks: beyond that the replays would take long, and the closed form is hardly wrong."""


def shifted(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All sizes with one layer on the other side of one cut.

    >>> list(shifted((2, 1, 2)))
    [(1, 2, 2), (2, 2, 1)]
    """
    for j in range(len(sizes) - 1):
        for more in (1, -1):
            found = (*sizes[:j], sizes[j] + more, sizes[j + 1] - more, *sizes[j + 2 :])
            if min(found) > 0:
                yield found


def neighbours(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    """Candidates that differ by a layer on the other side of a cut, and fit, with the seconds of a replay."""
    for sizes in shifted(candidate.sizes):
        modes = tuple(moved(candidate.modes, candidate.sizes, sizes))
        near = candidate_of(space, candidate.costs, candidate.schedule, sizes, modes)
        if bool(near.split) == bool(candidate.split) and not lacking(space, near):
            yield with_replay(near)


def improved(space: Space, candidate: Candidate) -> Candidate:
    """The candidate, or one with another balance that is faster by a replay.

    The closed form by which balances are chosen does not know which stage comes first: with few micro-batches the first
    one may have more to do than the others.

    Args:
        space: what is searched.
        candidate: with the seconds of a replay.
    """
    if len(candidate.sizes) ** 2 * candidate.chunks > MOST:
        return candidate
    return descended(candidate, lambda each: neighbours(space, each))


def descended(start: Candidate, near: Callable[[Candidate], Iterable[Candidate]]) -> Candidate:
    """From ``start`` to the fastest of those ``near`` it, again and again, as long as that is faster."""
    best = start
    while True:
        nearest = min(near(best), key=lambda each: each.seconds, default=best)
        if nearest.seconds >= best.seconds:
            return best
        best = nearest
