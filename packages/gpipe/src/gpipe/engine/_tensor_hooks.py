"""Detect whether layers register hooks on tensors, use nodes of their graph, which may have hooks, or save tensors
through hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import saved_tensors_hooks

# Who reads grad_fn may put a hook on the node later.
_HOOKING = (Tensor.register_hook, Tensor.retain_grad, getattr_static(Tensor, "grad_fn").__get__)


class TensorHooks(TorchFunctionMode):
    """A context that notices in ``seen`` if this thread registers hooks on tensors, or uses nodes of their graph, or
    saves tensors through hooks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # the compiler traces this mode too; what it makes has no such hooks
            return function(*args, **(kwargs or {}))
        # Whoever unpacks saved tensors, as torch.utils.checkpoint does to compute them again, expects to do so once.
        self.seen = self.seen or function in _HOOKING or saved_tensors_hooks() is not None
        return function(*args, **(kwargs or {}))
