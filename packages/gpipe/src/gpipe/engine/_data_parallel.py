"""Detects parameters whose gradients another wrapper averages in a way that a step would skip."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import Tensor


def may_be_data_parallel() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def refuse_data_parallel(parameters: Sequence[Tensor]) -> None:
    """Raise RuntimeError if a ``DistributedDataParallel`` that averages gradients has any of ``parameters``.

    Its hooks do nothing unless its own forward has run before: gradients would silently be those of this process alone.
    """
    if not parameters or not may_be_data_parallel():
        return
    wanted = {id(parameter) for parameter in parameters}
    # The wrapper is outside of the pipe, which has no reference to it, and torch has no list of wrappers. This look at
    # all objects takes long; it happens only if something refers to the node of a parameter.
    kind = torch.nn.parallel.DistributedDataParallel
    # By type(): isinstance() asks objects for their __class__, which runs code of proxies.
    every = gc.get_objects()
    kinds = {each for each in set(map(type, every)) if issubclass(each, kind)}
    around = [each for each in every if type(each) in kinds and each.require_backward_grad_sync] if kinds else []
    if any(not wanted.isdisjoint(map(id, each.parameters())) for each in around):
        raise RuntimeError(
            "step() does not go through the forward of the DistributedDataParallel around this pipe, which would not "
            "average its gradients; call ddp(input) and backward(), or use step() under ddp.no_sync() or without "
            "DistributedDataParallel, and call gpipe.distributed.average_gradients(pipe) after it"
        )
