"""How many rows each micro-batch gets."""

import operator
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

Sizes = tuple[int, ...]
Chunks = int | Iterable[int]
"""How many micro-batches to make at most, or the rows of each."""
Deal = Callable[[int], Sizes]
"""From the rows of a tensor to those of each of its micro-batches."""


def dealer(chunks: Any) -> Deal:
    """What deals rows so that there are `chunks` micro-batches, or so that they have these sizes whatever the rows.

    Raises:
        TypeError, ValueError: `chunks` is neither an integer of at least 1 nor some sizes of at least 0.
    """
    # Asked before it is tried: torch.compile of PyTorch 2.11 cannot trace a TypeError of operator.index.
    if isinstance(chunks, list | tuple):
        return _sizes(_explicit(chunks))
    try:
        return partial(_evenly, _count(operator.index(chunks)))
    except TypeError:
        return _sizes(_explicit(chunks))


def _sizes(sizes: Sizes) -> Deal:
    return lambda rows: sizes


def remembering(deal: Deal) -> Deal:
    """``deal``, asked once for each number of rows; not by functools.cache, which torch.compile cannot trace."""
    known: dict[int, Sizes] = {}

    def remembered(rows: int) -> Sizes:
        if rows not in known:
            known[rows] = deal(rows)
        return known[rows]

    return remembered


def _evenly(chunks: int, rows: int) -> Sizes:
    """As `torch.chunk`: blocks of the size rounded up, until none is left."""
    if not rows:
        return (0,) * chunks
    size = -(-rows // chunks)
    full, rest = divmod(rows, size)
    return (size,) * full + ((rest,) if rest else ())


def _count(chunks: int) -> int:
    if chunks < 1:
        raise ValueError(f"chunks is {chunks!r}; expected at least 1")
    return chunks


def _explicit(chunks: Any) -> Sizes:
    try:
        sizes = () if isinstance(chunks, str) else tuple(map(operator.index, chunks))
    except TypeError:
        sizes = ()
    if not sizes:
        raise TypeError(f"chunks is {chunks!r}; expected an integer of at least 1, or the rows of each micro-batch")
    if min(sizes) < 0:
        raise ValueError(f"chunks is {list(sizes)}; no micro-batch can have fewer than 0 rows")
    return sizes
