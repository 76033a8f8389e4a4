"""Whether tensors of an input belong together row by row, and a target has the rows of the input."""

from __future__ import annotations

from collections.abc import Sequence

from microbatch import Batch


def expect_same_rows(targets: Sequence[Batch], inputs: Sequence[Batch]) -> None:
    """Raise ValueError unless every micro-batch of the target has as many rows as its input.

    Tensors of one input may differ in rows; then those of the target are to be like one of them each.
    """
    own, others = _columns(targets), _columns(inputs)
    # Micro-batches of other numbers of rows can be equally many: 3 rows in 2 chunks are 2 and 1, where 4 are 2 and 2.
    if any(column not in others for column in own):
        raise ValueError(
            f"target has {_described(own)}, the input {_described(others)}; a target has a row for each row of the "
            "input; reshape it, or say by Split(..., dim) or Replicate(...) around a part of it where its rows are"
        )


def expect_proportional(inputs: Sequence[Batch]) -> None:
    """Raise ValueError unless tensors of n and of k·n rows are cut at the same samples.

    10 rows in 4 chunks are 3, 3, 3 and 1, where 20 are 5 each.
    """
    if len(inputs[0].rows) < 2:
        return
    first, *others = columns = _columns(inputs)
    if any(rows * first[0] != own * other[0] for other in others for rows, own in zip(other, first, strict=True)):
        raise ValueError(
            f"tensors of the input have {_described(columns)}, which do not belong together; give all a row for each "
            "sample, or as many for each that both divide evenly into the chunks, or say by Replicate(...) around one "
            "that it goes whole to each micro-batch"
        )


def _columns(batches: Sequence[Batch]) -> list[tuple[int, ...]]:
    """The rows in each micro-batch, for each number of rows among the tensors."""
    return list(zip(*[batch.rows for batch in batches], strict=True))


def _described(columns: Sequence[tuple[int, ...]]) -> str:
    """
    >>> _described([(2, 2), (4, 3)])
    '4 and 7 rows (in micro-batches of 2, 2 and 4, 3)'
    """
    rows = " and ".join(str(sum(column)) for column in columns)
    parts = " and ".join(", ".join(map(str, column)) for column in columns)
    return f"{rows} rows (in micro-batches of {parts})"
