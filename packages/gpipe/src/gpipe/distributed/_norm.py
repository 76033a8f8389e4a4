"""The norm of the gradients of all stages, wherever they are, and what is clipped by it."""

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
    """The 2-norm of the gradients of all members of ``group``, which call this together; returned on ``device``.

    Args:
        group: all processes by default; reduces on devices whose backend it has.
        meet: exchanges reports between the same members, also to find out whether one does not take part.
        gradients: those that only this member has, maybe none; of sharded ones each member of the mesh has a part.
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
        meet({})  # a reduction in which a member does not take part would never end
        dist.all_reduce(square, group=group)  # queued on the device: the host does not wait
        return square
    squares = [each["square"] for each in meet({"square": square.item()})]
    return torch.tensor(sum(squares), dtype=square.dtype, device=square.device)


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients of ``parameters`` down if the ``norm`` of all is larger than ``max_norm``."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    has_sparse = any(parameter.grad.is_sparse for parameter in trained)  # type: ignore[union-attr]
    clip_grads_with_norm_(trained, max_norm, norm, foreach=False if has_sparse else None)
