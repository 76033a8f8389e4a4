"""Whether what comes out of micro-batches has a row for each that went in."""

from collections.abc import Sequence

from torch import Tensor

from ._batch import Batch
from ._tree import Place


def expect_rows(parts: Sequence[Tensor], batches: Sequence[Batch], place: Place) -> None:
    """ValueError where dimension 0 of the parts cannot be made of the rows of their micro-batches.

    It may be k times the rows, with one k for all, so that tokens that were flattened into one dimension pass. A single
    micro-batch is not concatenated, and where rows are not known nothing can be said.
    """
    if len(parts) == 1 or _are_rows(parts, batches):
        return
    sizes = tuple([part.shape[0] for part in parts])
    columns = list(zip(*[batch.rows for batch in batches], strict=False))
    if columns and sizes not in columns and not any(_are_tokens(parts, sizes, rows) for rows in columns):
        raise ValueError(_message(parts, columns, place))


def _are_rows(parts: Sequence[Tensor], batches: Sequence[Batch]) -> bool:
    """Whether all is as it nearly always is: one row for one row."""
    for part, batch in zip(parts, batches, strict=True):
        if not batch.rows or part.shape[0] != batch.rows[0]:
            return False
    return True


def weights(batches: Sequence[Batch], place: Place) -> list[float]:
    """The share of each micro-batch in all rows."""
    for i, batch in enumerate(batches):
        if not batch.rows:
            raise ValueError(
                f"{place} is to be a Mean() by rows, but micro-batch {i} does not know how many it has; make it by "
                "batch.call(...) of one that scatter made, or say Batch(value, rows=(n,))"
            )
    rows = [batch.rows[0] for batch in batches]
    return [each / max(1, sum(rows)) for each in rows]


def _are_tokens(parts: Sequence[Tensor], sizes: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether dimension 0 is k times the rows.

    If at the same time another dimension is exactly the rows, as in (time, rows, features), that one is meant.
    """
    times = sum(sizes) // max(1, sum(rows))
    follows = all(size == times * row for size, row in zip(sizes, rows, strict=True))
    return follows and (times < 2 or _other_dimension(parts, rows) is None)


def _other_dimension(parts: Sequence[Tensor], rows: Sequence[int]) -> int | None:
    for dim in range(1, parts[0].dim()):
        if all(part.dim() > dim and part.shape[dim] == row for part, row in zip(parts, rows, strict=True)):
            return dim
    return None


def _message(parts: Sequence[Tensor], columns: Sequence[Sequence[int]], place: Place) -> str:
    shapes = ", ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
    facts = f"the micro-batches have {' or '.join(str(list(rows)) for rows in columns)}, its shapes are {shapes}"
    for rows in columns:
        if (dim := _other_dimension(parts, rows)) is not None:
            return (
                f"{place} has its rows on dimension {dim}, not 0: {facts}; say Split({dim}) of it in the spec, or "
                "Split(0) to concatenate it along dimension 0 all the same"
            )
    return (
        f"{place} does not follow the rows: {facts}; say in the spec what it is: Mean() or Sum() for one value of each "
        "micro-batch, Replicate() if it is the same for all, Split(dim), or Split(0) to concatenate it all the same"
    )
