"""Join what micro-batches have in one place: concatenate tensors, reduce values, or expect them to be equal."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ._batch import Batch
from ._paths import LeafPath
from ._rows import expect_rows
from ._rules import ROWS, Mean, Rule, Split, Sum


def joined(parts: Sequence[Any], rule: Rule, batches: Sequence[Batch], place: LeafPath) -> Any:
    """One leaf of all `batches`, by its rule."""
    if isinstance(rule, Split):
        return _rows_joined(parts, rule, batches, place)
    if isinstance(rule, Mean | Sum):
        return _reduced(parts, rule, batches, place)
    for i, part in enumerate(parts):
        if not _equal(parts[0], part):
            raise ValueError(
                f"{place} is not the same in micro-batch {i} as in micro-batch 0; what is not split must be"
            )
    return parts[0]


def _rows_joined(parts: Sequence[Any], rule: Split, batches: Sequence[Batch], place: LeafPath) -> Tensor:
    first, dim = parts[0], rule.dim
    if not -first.dim() <= dim < first.dim():
        raise ValueError(
            f"{place} has shape {tuple(first.shape)} and no dimension {dim} to concatenate along; give it a row for "
            "each sample, or declare in the spec what it is: Mean() or Sum() for one value of each micro-batch, "
            "Replicate() if it is the same for all"
        )
    # First the rows: that parts are unlike may only mean that their rows are elsewhere.
    if rule is ROWS and {part.dim() if isinstance(part, Tensor) else -1 for part in parts} == {first.dim()}:
        expect_rows(parts, batches, place)
    _expect_alike(parts, place, dim % first.dim())
    return first if len(parts) == 1 else concatenate(parts, dim)


def concatenate(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`, also for dtypes that it refuses under autocast, such as float16 under autocast to bfloat16.

    Args:
        tensors: at least one, on one device.
        dim: the dimension along which they are concatenated.

    Returns:
        A tensor of their dtype; of the widest if they differ.

    >>> half = torch.ones(1, dtype=torch.float16)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     concatenate([half, half])
    tensor([1., 1.], dtype=torch.float16)
    """
    device = tensors[0].device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if casts else nullcontext():
        return torch.cat(tuple(tensors), dim)


def _reduced(parts: Sequence[Any], rule: Mean | Sum, batches: Sequence[Batch], place: LeafPath) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        _expect_alike(parts, place)
        if isinstance(rule, Mean) and not (first.is_floating_point() or first.is_complex()):
            raise TypeError(
                f"{place} is of dtype {first.dtype}, which has no Mean(); make it floating point, or Sum() it"
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
                f"{place} is to be a Mean() by rows, but micro-batch {i} does not know how many it has; make it by "
                "batch.call(...) of one that scatter made, or make Batch(value, rows=(n,))"
            )
    whole = sum(batch.rows[0] for batch in batches)
    return [batch.rows[0] / max(1, whole) for batch in batches]  # without any rows, each mean is NaN, and so is theirs


def _expect_alike(parts: Sequence[Any], place: LeafPath, dim: int | None = None) -> None:
    """TypeError or ValueError unless all are tensors that differ at most in the size of dimension `dim`."""
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
        # torch.cat would promote dtypes, and skip empty tensors of another shape, without an error.
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
    # Only a NaN differs from itself.
    found = (first == other) | ((first != first) & (other != other))
    return bool(found.all() if hasattr(found, "all") else found)
