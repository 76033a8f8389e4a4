"""Compute the gradient norm over all stages, and clip gradients by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ._groups import Group, expect_group
from ._rendezvous import Report


def norm_over(
    group: Group | None, meet: Callable[[Report], list[Report]], gradients: Sequence[Tensor], device: torch.device
) -> Tensor:
    """Return the 2-norm of the gradients of all members of ``group``, which call this together.

    Args:
        group: the members; by default all processes. It reduces on ``device`` if it has a backend for it.
        meet: exchanges reports between the same members, and detects members that do not take part.
        gradients: the gradients that only this member has, maybe none. Members of a mesh each pass their shards.
        device: the device of the result, a float32 scalar.
    """
    with torch.no_grad():
        dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
        kinds = [[each for each in dense if hasattr(each, "to_local") is sharded] for sharded in (False, True)]
        squares = [_whole(get_total_norm(kind)).to(device, torch.float64).square() for kind in kinds if kind]
        none = torch.zeros((), dtype=torch.float64, device=device)
        return _summed(expect_group(group), meet, sum(squares, start=none)).sqrt().float()


def _whole(norm: Any) -> Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]


def _summed(group: dist.ProcessGroup, meet: Callable[[Report], list[Report]], square: Tensor) -> Tensor:
    if square.device.type != "cpu" and f"{square.device.type}:" in dist.get_backend_config(group):
        meet({})  # because a reduction without one of the members would hang
        dist.all_reduce(square, group=group)  # queued on the device: the host does not wait
        return square
    squares = [each["square"] for each in meet({"square": square.item()})]
    return torch.tensor(sum(squares), dtype=square.dtype, device=square.device)


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients of ``parameters`` down if ``norm``, the norm of all gradients, exceeds ``max_norm``."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    has_sparse = any(parameter.grad.is_sparse for parameter in trained)  # type: ignore[union-attr]
    clip_grads_with_norm_(trained, max_norm, norm, foreach=False if has_sparse else None)
