"""Gradients that the forward of a model computes itself, for example forces from an energy.

A stage or a replay has only its own part of the graph, so ``torch.autograd.grad`` works only within that part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..values._leaves import tensors_of


def differentiated(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Tensor]:
    """Return the ``inputs`` of the call if ``function`` is ``torch.autograd.grad``, and nothing otherwise.

    Raises:
        RuntimeError: it is ``Tensor.backward``, which would end at the tensors of earlier stages.
    """
    if function in (Tensor.backward, torch.autograd.backward):
        raise RuntimeError(
            "between its blocks the model calls backward(), whose gradients would miss what goes through blocks of "
            "other stages; let it return the loss, call backward() in a block, or use the plain model: pipe[:]"
        )
    if function is not torch.autograd.grad:
        return ()
    return tensors_of(args[1] if len(args) > 1 else kwargs["inputs"])


def through_blocks(model: str) -> RuntimeError:
    return RuntimeError(
        f"{model} calls torch.autograd.grad with respect to a tensor that an earlier stage has computed, or that was "
        "there before a block was called; such a gradient would miss what goes through the blocks in between; compute "
        "it in a block, or use the plain model: pipe[:]"
    )
