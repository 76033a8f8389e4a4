"""Join micro-batches into a mini-batch."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec

from ._alike import aligned, expect_rows, expect_tensors, kind, same, unlike
from ._batch import Batch
from ._concatenate import concatenate
from ._reduce import reduced
from ._rules import ROWS, Mean, Rule, Split, Sum
from ._spec import ruled
from ._tree import Place, flatten, is_tensors, unflatten


def gather(batches: Iterable[Batch], spec: Any = None) -> Any:
    """Join the values of `batches`, as the inverse of `scatter`: rows are concatenated. Gradients flow back into each
    batch.

    A tensor without a rule in the spec must have as many entries on dimension 0 as its micro-batch has rows, or k times
    as many, if `Batch.rows` is known. Otherwise it does not have a row for each sample, and needs a rule in the spec.
    (A size that equals the number of rows by chance is not noticed.)

    Args:
        batches: the micro-batches, in order. A single one is returned as it is, not copied.
    spec: how leaves are joined, as a tree of rules that is a prefix of the value. `Split(dim)`: concatenated
            along `dim`, whatever the sizes. `Mean()`: averaged by rows. `Sum()`: added up. `Replicate()`: the leaves
            must be equal, and the first is returned; comparing tensors waits for their device, unless they are one
            object. None must be None everywhere.

    Returns:
        A value of the structure of the batches' values.

    Raises:
        TypeError: an entry is not a Batch; a leaf is neither a tensor nor None and is not replicated.
        ValueError: there are no micro-batches; they differ in structure, dtype, device, or shape beyond the rows; a
            tensor does not follow the rows, or has no dimensions, such as a loss. The message names the path, as in
            `output['logits']`.

    >>> import torch
    >>> gather([Batch(torch.tensor([0, 1])), Batch(torch.tensor([2]))])
    tensor([0, 1, 2])
    >>> gather([Batch(torch.tensor(1.0), rows=(2,)), Batch(torch.tensor(4.0), rows=(1,))], Mean())
    tensor(2.)
    """
    batches = [batch if isinstance(batch, Batch) else _no_batch(batch, i) for i, batch in enumerate(batches)]
    if not batches:
        raise ValueError("gather got no micro-batches; expected at least one")
    values = [batch.value for batch in batches]
    first = values[0]
    if spec is None and isinstance(first, Tensor):
        return _cat(values, ROWS, batches, Place(first, 0, "output"))
    if spec is None and is_tensors(first) and all(is_tensors(value) and len(value) == len(first) for value in values):
        columns = enumerate(zip(*values, strict=True))
        return tuple([_cat(column, ROWS, batches, Place(first, i, "output")) for i, column in columns])
    return _gather_tree(values, batches, spec)


def _no_batch(batch: Any, i: int) -> Any:
    raise TypeError(f"micro-batch {i} is of type {type(batch).__name__}; expected a Batch, as scatter makes them")


def _gather_tree(values: Sequence[Any], batches: Sequence[Batch], spec: Any) -> Any:
    first = values[0]
    first, leaves, chosen, tree = ruled(first, spec, "output")
    rows = [leaves, *[_leaves_like(first, tree, value, i) for i, value in enumerate(values) if i]]
    columns = enumerate(zip(chosen, zip(*rows, strict=True), strict=True))
    return unflatten([_leaf(column, rule, batches, Place(first, i, "output")) for i, (rule, column) in columns], tree)


def _leaves_like(first: Any, tree: TreeSpec, value: Any, i: int) -> list[Any]:
    """The leaves of the value of micro-batch i, in the order of those of the first."""
    leaves, its = flatten(value)
    return (
        leaves if its == tree else list(aligned(first, value, f"micro-batch {i} is unlike micro-batch 0: ", "output"))
    )


def _leaf(parts: Sequence[Any], rule: Rule, batches: Sequence[Batch], place: Place) -> Any:
    if isinstance(rule, Split):
        return _cat(parts, rule, batches, place)
    if isinstance(rule, Mean | Sum):
        return reduced(parts, rule, batches, place)
    return same(parts, place)


def _cat(parts: Sequence[Any], rule: Split, batches: Sequence[Batch], place: Place) -> Tensor:
    first, dim = parts[0], rule.dim
    expect_tensors(parts, place)
    if not -first.dim() <= dim < first.dim():
        raise ValueError(
            f"{place} has shape {tuple(first.shape)} and no dimension {dim} to concatenate along; give it a row for "
            "each sample, or declare in the spec what it is: Mean() or Sum() for one value of each micro-batch, "
            "Replicate() if it is the same for all"
        )
    if rule is ROWS:
        expect_rows(parts, batches, place)
    return first if len(parts) == 1 else _concatenate(parts, dim, place)


def _concatenate(parts: Sequence[Tensor], dim: int, place: Place) -> Tensor:
    try:
        return concatenate(parts, dim)
    except (RuntimeError, TypeError) as error:
        first = parts[0]
        for i, part in enumerate(parts):
            if _but_rows(part, dim) != _but_rows(first, dim):
                raise unlike(first, part, i, place) from None
        if first.is_quantized or type(first) is not Tensor:  # these may not implement the operators that follow
            raise TypeError(f"{place} is {kind(first)}, which torch cannot concatenate: {error}") from error
        raise


def _but_rows(tensor: Tensor, dim: int) -> tuple[object, ...]:
    shape = list(tensor.shape)
    del shape[dim]
    return tensor.device, tensor.layout, shape
