"""How a stage is checkpointed, as plans say it: by one mode, or layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby

Way = str | tuple[bool, ...]
"""A mode of the whole stage, or for each of its layers whether it is computed again."""


def way_of(flags: Iterable[bool]) -> Way:
    """These flags, or the mode that says the same.

    >>> way_of([True, True]), way_of([True, False])
    ('always', (True, False))
    """
    found = tuple(flags)
    return found if len(set(found)) > 1 else "always" if found[0] else "never"


def modes_of(ways: Iterable[Way]) -> tuple[str, ...]:
    """What schedules see: layers with flags are computed again inside of backwards, which are no actions of their own.

    >>> modes_of(["always", (True, False)])
    ('always', 'never')
    """
    return tuple(way if isinstance(way, str) else "never" for way in ways)


def given(ways: Iterable[Way]) -> list[str | list[bool]]:
    """As :class:`gpipe.GPipe` takes and shows them."""
    return [way if isinstance(way, str) else list(way) for way in ways]


def pieces_of(flags: Sequence[bool]) -> Iterator[tuple[bool, int, int]]:
    """The runs of layers of one kind: whether they are computed again, the first, and the end.

    >>> list(pieces_of([False, True, True]))
    [(False, 0, 1), (True, 1, 3)]
    """
    end = 0
    for flag, run in groupby(flags):
        first, end = end, end + len(list(run))
        yield flag, first, end


def following(ways: Sequence[Way], sizes: Sequence[int]) -> list[Way]:
    """What each stage has of all layers, if layers with flags keep them wherever they move.

    As :meth:`gpipe.GPipe.rebalance` moves them: a stage with a mode has that for all layers that have no flag.

    Args:
        ways: of the stages.
        sizes: their layers.

    >>> following(["always", (True, False)], [1, 2])
    [(True, True, False), (True, True, False)]
    """
    if all(isinstance(way, str) for way in ways):
        return list(ways)
    known = [*zip(ways, sizes, strict=True)]
    flagged = [[*way] if not isinstance(way, str) else [None] * size for way, size in known]
    before = [way != "never" for way, size in known for _ in range(size)]
    own = [flag for flags in flagged for flag in flags]

    def of(way: Way) -> Way:
        rest = [way != "never"] * len(own) if isinstance(way, str) else before
        return tuple(other if flag is None else flag for flag, other in zip(own, rest, strict=True))

    return [of(way) for way in ways]


def moved_ways(ways: Sequence[Way], before: Sequence[int], after: Sequence[int]) -> tuple[Way, ...]:
    """The ways of stages of other sizes, if flags follow their layers.

    >>> moved_ways(["never", (True, False)], [1, 2], [2, 1])
    ((False, True), 'never')
    """
    found = following(ways, before)
    ends = list(accumulate(after))
    return tuple(
        way if isinstance(way, str) else way_of(way[end - size : end])
        for way, size, end in zip(found, after, ends, strict=True)
    )


def shown(way: Way) -> str:
    """As text for people, who count layers from one.

    >>> shown("never"), shown((False, False, True, True, False, True))
    ('never', 'layers 3-4, 6 of 6')
    """
    if isinstance(way, str):
        return way
    runs = [(first + 1, end) for flag, first, end in pieces_of(way) if flag]
    numbers = ", ".join(str(end) if first == end else f"{first}-{end}" for first, end in runs)
    return f"layer{'s' * (sum(way) > 1)} {numbers} of {len(way)}"
