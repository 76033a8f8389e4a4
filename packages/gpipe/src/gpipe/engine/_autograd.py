"""Connect a run to the caller's autograd graph with two nodes, for any number of stages.

::

    input --> PipelineBackward --token--> Attach --> output
               on the CPU          on the output's device

Autograd runs a node on the thread of its gradients' device. A node on a GPU's thread that waited for the workers would
block their backwards, which need that thread. So ``Attach`` only stores the gradients, and passes an empty CPU tensor
to ``PipelineBackward``, which waits on the CPU's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Backward = Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]]
"""A function from the gradients of the outputs to the gradients of the inputs; None stands for no gradient."""


def attach(backward: Backward, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Connect ``outputs`` to ``inputs`` in the caller's graph by a node that calls ``backward``.

    An output that requires grad still does if no input does, because parameters of the pipe may.
    """
    differentiable = [tensor.requires_grad for tensor in outputs]
    if not any(differentiable):
        return outputs
    seeds: list[Tensor | None] = []
    # On the CPU, and requires grad, so that the node runs even if only parameters of the pipe require grad.
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    token = PipelineBackward.apply(backward, seeds, anchor, *inputs)  # type: ignore[no-untyped-call]
    # Detached, because AccumulateGrad nodes would keep leaves that require grad alive.
    found = Attach.apply(seeds, differentiable, token, *map(Tensor.detach, outputs))  # type: ignore[no-untyped-call]
    return list(found)


class Attach(torch.autograd.Function):
    """The identity on the outputs; its backward stores their gradients."""

    @staticmethod
    def forward(
        ctx: Any, seeds: list[Tensor | None], differentiable: list[bool], token: Tensor, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.seeds = seeds
        ctx.set_materialize_grads(False)
        fresh = tuple(map(Tensor.detach, outputs))
        # Otherwise autograd would set requires_grad on every floating-point output.
        ctx.mark_non_differentiable(*[each for each, flag in zip(fresh, differentiable, strict=True) if not flag])
        return fresh

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.seeds[:] = gradients
        return None, None, torch.empty(0, device="cpu"), *([None] * len(gradients))


class PipelineBackward(torch.autograd.Function):
    """Maps the inputs to a token that represents the run; the backward calls the run's backward.

    The inputs include parameters with hooks of other code on their ``AccumulateGrad`` node, which fire when it runs.
    """

    @staticmethod
    def forward(ctx: Any, backward: Backward, seeds: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.run = backward
        ctx.seeds = seeds
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd enables grad mode in a backward only for create_graph=True.
        if torch.is_grad_enabled():
            raise RuntimeError("a pipeline cannot be differentiated twice; call backward() without create_graph=True")
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "the backward of a pipeline writes the gradients of its parameters to their .grad, so "
                "torch.autograd.grad() and backward(inputs=...) cannot go through it; call backward() and read .grad"
            )
        if ctx.run is None:
            ctx.seeds.clear()
            raise RuntimeError(
                "backward through the same run of a pipeline a second time; what it kept is gone after the first, also "
                "with retain_graph=True; run the pipeline again"
            )
        # Reset before the run: if it fails, parts of its graphs are freed, and a second backward must also raise.
        run, ctx.run = ctx.run, None
        seeds = ctx.seeds[:]
        # This node lives as long as the caller holds an output, but the gradients must not.
        ctx.seeds.clear()
        return None, None, None, *run(seeds)
