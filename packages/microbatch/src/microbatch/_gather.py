"""Combine micro-batches into a mini-batch."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec

from ._batch import Batch
from ._paths import LeafPath, leaf_paths
from ._rules import ROWS, Entries, Mean, Rule, Split, Sum
from ._spec import assign_rules
from ._tree import flatten, is_tensors, unflatten


def gather(batches: Iterable[Batch], spec: Any = None) -> Any:
    """Concatenate the rows of `batches`, the inverse of `scatter`. Gradients flow back.

    If `Batch.rows` is known, dimension 0 of a tensor without a rule in the spec must equal the rows of its micro-batch,
    or k times the rows. (A size that equals the number of rows by chance is not detected.)

    Args:
        batches: the micro-batches, in order. The value of a single one is returned without a copy.
        spec: how to combine leaves, as a tree of rules that is a prefix of the value. `Split(dim)` concatenates along
            `dim`, whatever the sizes; `Mean()` averages, weighted by rows; `Sum()` adds up. With `Replicate()` the
            leaves must be equal, and the first is returned; comparing tensors synchronizes with their device, unless
            they are the same object. A leaf that is None must be None in all micro-batches.

    Returns:
        A value with the structure of the micro-batches.

    Raises:
        TypeError: an entry is not a Batch; a leaf is neither a tensor nor None and is not replicated.
        ValueError: there are no micro-batches; they differ in structure, dtype, device, or shape besides the rows; the
            size of a tensor does not match the rows, or it has no dimensions. The message contains the path, as in
            `output['logits']`.

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
            raise TypeError(f"micro-batch {i} is of type {type(batch).__name__}; expected a Batch, as scatter returns")
    if not batches:
        raise ValueError("gather got no micro-batches; expected at least one")
    values = tuple([batch.value for batch in batches])
    first = values[0]
    if spec is None and is_tensors(values):
        return join(values, ROWS, batches, LeafPath(first, 0, "output"))
    if spec is None and is_tensors(first) and all(is_tensors(value) and len(value) == len(first) for value in values):
        columns = enumerate(zip(*values, strict=True))
        return tuple([join(column, ROWS, batches, LeafPath(first, i, "output")) for i, column in columns])
    first, leaves, rules, tree = assign_rules(first, spec, "output")
    if any(isinstance(rule, Entries) for rule in rules):
        raise TypeError("the spec of the output has Entries(), which is only for inputs; give a different rule")
    rows = [leaves, *[_leaves_like(first, tree, value, i) for i, value in enumerate(values) if i]]
    columns = enumerate(zip(*rows, strict=True))
    return unflatten([join(column, rules[i], batches, LeafPath(first, i, "output")) for i, column in columns], tree)


def _leaves_like(first: Any, tree: TreeSpec, value: Any, i: int) -> list[Any]:
    leaves, its = flatten(value)
    # Trees are equal if their types, keys and constants are. Otherwise unrelated leaves would be combined.
    if its != tree:
        raise ValueError(
            f"micro-batch {i} is unlike micro-batch 0: a {type(value).__name__} with the leaves {_list_paths(value)} "
            f"instead of a {type(first).__name__} with the leaves {_list_paths(first)}; "
            "all must have the same types, keys and constants"
        )
    return leaves


def _list_paths(value: Any) -> str:
    return ", ".join(leaf_paths(value, "output")) or "none"


def join(parts: Sequence[Any], rule: Rule, batches: Sequence[Batch], place: LeafPath) -> Any:
    """Combine one leaf of all `batches` by its rule."""
    if isinstance(rule, Split):
        return _join_rows(parts, rule, batches, place)
    if isinstance(rule, Mean | Sum):
        return _reduce(parts, rule, batches, place)
    for i, part in enumerate(parts):
        if not _equal(parts[0], part):
            raise ValueError(
                f"{place} differs between micro-batches 0 and {i}; leaves that are not split must be equal"
            )
    return parts[0]


def _join_rows(parts: Sequence[Any], rule: Split, batches: Sequence[Batch], place: LeafPath) -> Tensor:
    first, dim = parts[0], rule.dim
    if not -first.dim() <= dim < first.dim():
        raise ValueError(
            f"{place} has shape {tuple(first.shape)} and no dimension {dim} to concatenate along; give it one row per "
            "sample, or declare it in the spec: Mean() or Sum() for one value per micro-batch, Replicate() if all are "
            "equal"
        )
    # Check the rows first, because different shapes may only mean that the rows are on a different dimension.
    if rule is ROWS and {part.dim() if isinstance(part, Tensor) else -1 for part in parts} == {first.dim()}:
        expect_rows(parts, batches, place)
    _expect_alike(parts, place, dim % first.dim())
    return first if len(parts) == 1 else concatenate(parts, dim)


def concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Call `torch.cat` outside autocast, which rejects some dtypes, such as float16 under autocast to bfloat16.

    Args:
        tensors: at least one tensor, all on one device.
        dim: the dimension to concatenate along.

    Returns:
        A tensor of their dtype; of the promoted dtype if they differ.

    >>> half = torch.ones(1, dtype=torch.float16)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     concatenate([half, half])
    tensor([1., 1.], dtype=torch.float16)
    """
    device = tensors[0].device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if casts else nullcontext():
        return torch.cat(tuple(tensors), dim)


def _reduce(parts: Sequence[Any], rule: Mean | Sum, batches: Sequence[Batch], place: LeafPath) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        _expect_alike(parts, place)
        if isinstance(rule, Mean) and not (first.is_floating_point() or first.is_complex()):
            raise TypeError(
                f"{place} is of dtype {first.dtype}, which has no Mean(); convert it to floating point, or use Sum()"
            )
    for i, part in enumerate(parts):
        if not isinstance(part, int | float | complex | Tensor):
            raise TypeError(f"{place} is a number in micro-batch 0 but a {type(part).__name__} in micro-batch {i}")
    if len(parts) == 1:
        return first
    if isinstance(rule, Mean):
        parts = [part * weight for part, weight in zip(parts, _weights(batches, place), strict=True)]
    return sum(parts[1:], start=parts[0])


def _weights(batches: Sequence[Batch], place: LeafPath) -> list[float]:
    for i, batch in enumerate(batches):
        if not batch.rows:
            raise ValueError(
                f"{place} has the rule Mean(), which needs rows, but micro-batch {i} has none; create it with "
                "batch.call(...) from a batch of scatter, or with Batch(value, rows=(n,))"
            )
    whole = sum(batch.rows[0] for batch in batches)
    return [batch.rows[0] / max(1, whole) for batch in batches]  # with 0 rows, the means and the result are NaN


def _expect_alike(parts: Sequence[Any], place: LeafPath, dim: int | None = None) -> None:
    """Raise TypeError or ValueError unless all parts are tensors that differ at most in the size of `dim`."""
    first = parts[0]
    end = first.dim() if dim is None else dim
    facts = None
    for i, part in enumerate(parts):
        if not isinstance(part, Tensor):
            raise TypeError(
                f"{place} is a tensor in micro-batch 0 but of type {type(part).__name__} in micro-batch {i}"
            )
        shape = part.shape
        own = part.dtype, part.device, part.layout, len(shape), shape[:end], shape[end + 1 :]
        facts = facts or own
        # torch.cat would silently promote dtypes, and skip empty tensors of different shapes.
        if own != facts:
            raise ValueError(
                f"{place} is {_kind(first)} in micro-batch 0 but {_kind(part)} in micro-batch {i}; they may differ in "
                "rows only"
            )


def _kind(tensor: Tensor) -> str:
    name = "" if type(tensor) is Tensor else type(tensor).__name__ + " "
    return f"{name}{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _equal(first: Any, other: Any) -> bool:
    if first is other:
        return True
    facts = ("__class__", "shape", "dtype", "device")
    if any(getattr(first, name, None) != getattr(other, name, None) for name in facts):
        return False
    # NaNs count as equal; only a NaN differs from itself.
    found = (first == other) | ((first != first) & (other != other))
    return bool(found.all() if hasattr(found, "all") else found)


def expect_rows(parts: Sequence[Tensor], batches: Sequence[Batch], place: LeafPath) -> None:
    """Raise ValueError if dimension 0 of the parts does not match the rows of their micro-batches.

    It may be k times the rows, with the same k for all parts. A single micro-batch, or unknown rows, are not checked.
    """
    if len(parts) == 1:
        return
    sizes = tuple([part.shape[0] for part in parts])
    # Tensors of one mini-batch may differ in rows. There are no columns if the rows of a micro-batch are unknown.
    columns = list(zip(*[batch.rows for batch in batches], strict=False))
    if not columns or sizes in columns or any(_are_tokens(parts, sizes, rows) for rows in columns):
        return
    shapes = ", ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
    facts = f"the micro-batches have {' or '.join(str(list(rows)) for rows in columns)}, its shapes are {shapes}"
    for dim in (_other_dimension(parts, rows) for rows in columns):
        if dim is not None:
            raise ValueError(
                f"{place} has its rows on dimension {dim}, not 0: {facts}; use Split({dim}) for it in the spec, or "
                "Split(0) to concatenate it along dimension 0 anyway"
            )
    raise ValueError(
        f"{place} does not have one row per sample: {facts}; declare it in the spec: Mean() or Sum() for one value per "
        "micro-batch, Replicate() if all are equal, Split(dim), or Split(0) to concatenate it anyway"
    )


def _are_tokens(parts: Sequence[Tensor], sizes: Sequence[int], rows: Sequence[int]) -> bool:
    """Return whether dimension 0 is k times the rows.

    For k > 1 it is False if a different dimension equals the rows, as in (time, rows, features), because the rows are
    probably there.
    """
    times = sum(sizes) // max(1, sum(rows))
    follows = all(size == times * row for size, row in zip(sizes, rows, strict=True))
    return follows and (times < 2 or _other_dimension(parts, rows) is None)


def _other_dimension(parts: Sequence[Tensor], rows: Sequence[int]) -> int | None:
    dims = range(1, min(part.dim() for part in parts))
    return next((dim for dim in dims if all(p.shape[dim] == n for p, n in zip(parts, rows, strict=True))), None)
