"""Hooks on a pipe itself. ``step`` does not go through ``nn.Module.__call__``, which would call them."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._keywords import as_arguments, as_value


def refuse_hooks(pipe: nn.Module, method: str) -> None:
    """Raise RuntimeError if ``pipe`` has hooks that ``method`` cannot call, because it computes losses inside."""
    kinds = {
        "forward": pipe._forward_hooks,
        "full backward": pipe._backward_hooks,
        "full backward pre": pipe._backward_pre_hooks,
    }
    found = [kind for kind, hooks in kinds.items() if hooks]
    if found:
        raise RuntimeError(
            f"{method}() cannot call the {' and '.join(found)} hooks of this pipe: each micro-batch has its "
            "own loss, so the whole output never exists; register them on a layer, such as "
            "pipe[-1], which calls them for each micro-batch, or use pipe(input) and backward()"
        )


def pre_hooked(pipe: nn.Module, inputs: Any) -> Any:
    """``inputs`` after the forward pre-hooks of ``pipe``."""
    if not pipe._forward_pre_hooks:
        return inputs
    args, kwargs = as_arguments(inputs)
    for key, hook in pipe._forward_pre_hooks.items():
        if key in pipe._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(pipe, args, kwargs) or (args, kwargs)
        elif (found := hook(pipe, args)) is not None:
            args = found if isinstance(found, tuple) else (found,)
    return as_value(args, kwargs)
