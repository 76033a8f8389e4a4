"""Hooks of modules that are not called as modules: replaced layers, containers, and pipes under ``step``."""

from __future__ import annotations

from torch import nn


def hook_kinds(module: nn.Module) -> list[str]:
    own = vars(module)
    return [name.strip("_").replace("_", " ") for name in own if name.endswith("_hooks") and own[name]]


def refuse_hooks(pipe: nn.Module, method: str) -> None:
    """Raise RuntimeError if ``pipe`` has hooks, which ``method`` cannot call, because it computes losses inside."""
    for kind in hook_kinds(pipe):
        if kind.startswith(("forward", "backward")):
            raise RuntimeError(
                f"{method}() cannot call the {kind} of this pipe, because each micro-batch has its own input and loss; "
                "register them on a layer, such as pipe[-1], which calls them once per micro-batch, or use pipe(input) "
                "and backward()"
            )
