"""The rows of micro-batches, and whether an output follows them."""

from collections.abc import Sequence

from torch import Tensor

from ._batch import Batch
from ._paths import LeafPath


def expect_rows(parts: Sequence[Tensor], batches: Sequence[Batch], place: LeafPath) -> None:
    """Raise ValueError if dimension 0 of the parts does not follow the rows of their micro-batches.

    It may be k times the rows, with the same k for all parts. A single micro-batch is not checked, nor unknown rows.
    """
    if len(parts) == 1:
        return
    sizes = tuple([part.shape[0] for part in parts])
    # Tensors of one mini-batch may differ in rows. No column is left if a micro-batch does not know its rows.
    columns = list(zip(*[batch.rows for batch in batches], strict=False))
    if not columns or sizes in columns or any(_are_tokens(parts, sizes, rows) for rows in columns):
        return
    shapes = ", ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
    facts = f"the micro-batches have {' or '.join(str(list(rows)) for rows in columns)}, its shapes are {shapes}"
    for dim in (_other_dimension(parts, rows) for rows in columns):
        if dim is not None:
            raise ValueError(
                f"{place} has its rows on dimension {dim}, not 0: {facts}; use Split({dim}) for it in the spec, or "
                "Split(0) to concatenate it along dimension 0 all the same"
            )
    raise ValueError(
        f"{place} does not follow the rows: {facts}; declare in the spec what it is: Mean() or Sum() for one value of "
        "each micro-batch, Replicate() if it is the same for all, Split(dim), or Split(0) to concatenate it anyway"
    )


def _are_tokens(parts: Sequence[Tensor], sizes: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether dimension 0 is k times the rows.

    False if another dimension is exactly the rows, as in (time, rows, features): then that dimension is meant.
    """
    times = sum(sizes) // max(1, sum(rows))
    follows = all(size == times * row for size, row in zip(sizes, rows, strict=True))
    return follows and (times < 2 or _other_dimension(parts, rows) is None)


def _other_dimension(parts: Sequence[Tensor], rows: Sequence[int]) -> int | None:
    dims = range(1, min(part.dim() for part in parts))
    return next((dim for dim in dims if all(p.shape[dim] == n for p, n in zip(parts, rows, strict=True))), None)
