"""Hooks on a pipe itself. ``step`` does not go through ``nn.Module.__call__``, which would call them."""

from __future__ import annotations

from torch import nn


def refuse_hooks(pipe: nn.Module, method: str) -> None:
    """Raise RuntimeError if ``pipe`` has hooks, which ``method`` cannot call, because it computes losses inside."""
    kinds = {
        "forward pre-": pipe._forward_pre_hooks,
        "forward ": pipe._forward_hooks,
        "full backward ": pipe._backward_hooks,
        "full backward pre-": pipe._backward_pre_hooks,
    }
    for kind, hooks in kinds.items():
        if hooks:
            raise RuntimeError(
                f"{method}() cannot call the {kind}hooks of this pipe, because each micro-batch has its own input and "
                "loss; register them on a layer, such as pipe[-1], which calls them for each micro-batch, or use "
                "pipe(input) and backward()"
            )
