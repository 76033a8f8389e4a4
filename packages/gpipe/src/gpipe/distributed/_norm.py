"""The norm of the gradients of all stages, wherever they are, and what is clipped by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ._rendezvous import Report


def norm_over(meet: Callable[[Report], list[Report]], gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of the gradients of all ranks, which call this together; returned on ``device``.

    Args:
        meet: exchanges reports between the ranks.
        gradients: those that only this rank has, maybe none; of sharded ones each member of the mesh has a part.
    """
    dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    kinds = [[each for each in dense if hasattr(each, "to_local") is sharded] for sharded in (False, True)]
    norms = [_whole(get_total_norm(kind)).item() for kind in kinds if kind]
    squares = [each["square"] for each in meet({"square": sum(norm * norm for norm in norms)})]
    return torch.tensor(math.sqrt(sum(squares)), dtype=torch.float32, device=device)


def _whole(norm: Any) -> Tensor:
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]


def clip(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients of ``parameters`` down if the ``norm`` of all is larger than ``max_norm``."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    has_sparse = any(parameter.grad.is_sparse for parameter in trained)  # type: ignore[union-attr]
    clip_grads_with_norm_(trained, max_norm, norm, foreach=False if has_sparse else None)
