"""Join micro-batches into a mini-batch."""

from collections.abc import Iterable
from typing import Any

from torch.utils._pytree import TreeSpec

from ._batch import Batch
from ._join import joined
from ._paths import LeafPath, leaf_paths
from ._rules import ROWS
from ._spec import ruled
from ._tree import flatten, is_tensors, unflatten


def gather(batches: Iterable[Batch], spec: Any = None) -> Any:
    """Join the values of `batches`, as the inverse of `scatter`: rows are concatenated, and gradients flow back.

    A tensor without a rule in the spec must have as many entries on dimension 0 as its micro-batch has rows, or k times
    as many, if `Batch.rows` is known. (A size that equals the number of rows by chance is not noticed.)

    Args:
        batches: the micro-batches, in order. A single one is returned as it is, not copied.
        spec: how leaves are joined, as a tree of rules that is a prefix of the value. `Split(dim)`: concatenated along
            `dim`, whatever the sizes. `Mean()`: averaged by rows. `Sum()`: added up. `Replicate()`: the leaves must be
            equal, and the first is returned; comparing tensors waits for their device, unless they are one object. None
            must be None everywhere.

    Returns:
        A value of the structure of the batches' values.

    Raises:
        TypeError: an entry is not a Batch; a leaf is neither a tensor nor None and is not replicated.
        ValueError: there are no micro-batches; they differ in structure, dtype, device, or shape beyond the rows; a
            tensor does not follow the rows, or has no dimensions. The message names the path, as in `output['logits']`.

    >>> import torch
    >>> gather([Batch(torch.tensor([0, 1])), Batch(torch.tensor([2]))])
    tensor([0, 1, 2])
    >>> from microbatch import Mean
    >>> gather([Batch(torch.tensor(1.0), rows=(2,)), Batch(torch.tensor(4.0), rows=(1,))], Mean())
    tensor(2.)
    """
    batches = list(batches)
    for i, batch in enumerate(batches):
        if not isinstance(batch, Batch):
            raise TypeError(
                f"micro-batch {i} is of type {type(batch).__name__}; expected a Batch, as scatter makes them"
            )
    if not batches:
        raise ValueError("gather got no micro-batches; expected at least one")
    values = tuple([batch.value for batch in batches])
    first = values[0]
    if spec is None and is_tensors(values):
        return joined(values, ROWS, batches, LeafPath(first, 0, "output"))
    if spec is None and is_tensors(first) and all(is_tensors(value) and len(value) == len(first) for value in values):
        columns = enumerate(zip(*values, strict=True))
        return tuple([joined(column, ROWS, batches, LeafPath(first, i, "output")) for i, column in columns])
    first, leaves, rules, tree = ruled(first, spec, "output")
    rows = [leaves, *[_leaves_like(first, tree, value, i) for i, value in enumerate(values) if i]]
    columns = enumerate(zip(*rows, strict=True))
    return unflatten([joined(column, rules[i], batches, LeafPath(first, i, "output")) for i, column in columns], tree)


def _leaves_like(first: Any, tree: TreeSpec, value: Any, i: int) -> list[Any]:
    leaves, its = flatten(value)
    # Trees are equal if types, keys and constants are: leaves of an unlike one would be joined across places.
    if its != tree:
        raise ValueError(
            f"micro-batch {i} is unlike micro-batch 0: a {type(value).__name__} with the leaves {_listed(value)} "
            f"instead of a {type(first).__name__} with the leaves {_listed(first)}; "
            "all must have the same types, keys and constants"
        )
    return leaves


def _listed(value: Any) -> str:
    return ", ".join(leaf_paths(value, "output")) or "none"
