"""Compute the gradient norm over all stages, and clip gradients by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ._groups import Group, expect_group
from ._object_exchange import Report


def norm_over(
    group: Group | None, all_gather: Callable[[Report], list[Report]], gradients: Sequence[Tensor], device: torch.device
) -> Tensor:
    """Return the 2-norm of the gradients of all members of ``group``, which call this together.

    Args:
        group: the members; by default all processes. It reduces on ``device`` if it has a backend for it.
        all_gather: exchanges reports between the same members, and detects members that do not take part.
        gradients: the gradients that only this member has, maybe none. Members of a mesh each pass their shards.
        device: the device of the result, a float32 scalar.
    """
    with torch.no_grad():
        dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
        squares = [_whole(get_total_norm(kind)).to(device, torch.float64).square() for kind in _by_mesh(dense)]
        none = torch.zeros((), dtype=torch.float64, device=device)
        return _sum_squares(expect_group(group), all_gather, sum(squares, start=none)).sqrt().float()


def _by_mesh(gradients: Iterable[Any]) -> list[list[Tensor]]:
    """Group gradients by how they are sharded, because operators do not combine shards over different meshes."""
    found: dict[Any, list[Tensor]] = {}
    for each in gradients:
        kind = (each.device_mesh, each.placements) if hasattr(each, "placements") else None
        found.setdefault(kind, []).append(each)
    return [*found.values()]


def _whole(norm: Any) -> Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]


def _sum_squares(group: dist.ProcessGroup, all_gather: Callable[[Report], list[Report]], square: Tensor) -> Tensor:
    if square.device.type != "cpu" and f"{square.device.type}:" in dist.get_backend_config(group):
        all_gather({})  # because a reduction without one of the members would hang
        dist.all_reduce(square, group=group)  # queued on the device: the host does not wait
        return square
    squares = [each["square"] for each in all_gather({"square": square.item()})]
    return torch.tensor(sum(squares), dtype=square.dtype, device=square.device)


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients of ``parameters`` down if ``norm``, the norm of all gradients, exceeds ``max_norm``."""
    trained = {parameter.grad: parameter for parameter in parameters if parameter.grad is not None}
    for kind in _by_mesh(trained):
        has_sparse = any(gradient.is_sparse for gradient in kind)
        own = [trained[gradient] for gradient in kind]
        clip_grads_with_norm_(own, max_norm, norm, foreach=False if has_sparse else None)
