"""A run in the caller's autograd graph: two nodes, for any number of stages.

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
"""A function from the gradients of the outputs to those of the inputs; None where there is no gradient."""


def attach(backward: Backward, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """``outputs``, connected to ``inputs`` in the caller's graph by a node whose backward is ``backward``.

    Those that require grad do so even if no input does, because parameters inside may.
    """
    differentiable = [tensor.requires_grad for tensor in outputs]
    if not any(differentiable):
        return outputs
    seeds: list[Tensor | None] = []
    # So that the node has a gradient to compute if only parameters of the pipe need one, and is on the CPU.
    anchor = torch.empty(0, device="cpu", requires_grad=True)
    token = PipelineBackward.apply(backward, seeds, anchor, *inputs)  # type: ignore[no-untyped-call]
    # Detached: a leaf that requires grad would be kept alive by its AccumulateGrad node.
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
        # Without this, autograd would take every output of a floating dtype for one with a gradient.
        ctx.mark_non_differentiable(*[each for each, flag in zip(fresh, differentiable, strict=True) if not flag])
        return fresh

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.seeds[:] = gradients
        return None, None, torch.empty(0, device="cpu"), *([None] * len(gradients))


class PipelineBackward(torch.autograd.Function):
    """From the inputs to a token that stands for the run; its backward is that of the run.

    The inputs include parameters on whose ``AccumulateGrad`` node other code has hooks; these fire when the node runs.
    """

    @staticmethod
    def forward(ctx: Any, backward: Backward, seeds: list[Tensor | None], *inputs: Tensor) -> Tensor:
        ctx.run = backward
        ctx.seeds = seeds
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd enables grad mode in a backward for create_graph only.
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
        # Before the run: if it fails, parts of its graphs are gone, and a second one has to be refused too.
        run, ctx.run = ctx.run, None
        seeds = ctx.seeds[:]
        # This node lives as long as the caller has an output; the gradients must not.
        ctx.seeds.clear()
        return None, None, None, *run(seeds)
