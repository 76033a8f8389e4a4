"""Detect whether layers register hooks on tensors, access graph nodes, or use saved-tensor hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import saved_tensors_hooks, with_lost_weight

# Code that reads grad_fn may later put a hook on the node.
_HOOKING = (Tensor.register_hook, Tensor.retain_grad, getattr_static(Tensor, "grad_fn").__get__)


class TensorHooks(TorchFunctionMode):
    """Sets ``seen`` if this thread registers hooks on tensors, accesses graph nodes, or uses saved-tensor hooks.

    Args:
        own: the saved-tensor hooks of the engine, which do not count.
    """

    def __init__(self, own: object = None) -> None:
        super().__init__()
        self.seen = False
        self._own = None, own

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the compiler traces this mode, but its output has no such hooks
            return function(*args, **(kwargs or {}))
        kwargs = with_lost_weight(function, kwargs)
        # Saved-tensor hooks, such as the ones of torch.utils.checkpoint, expect to unpack each tensor once.
        self.seen = self.seen or function in _HOOKING or saved_tensors_hooks() not in self._own
        return function(*args, **kwargs)
