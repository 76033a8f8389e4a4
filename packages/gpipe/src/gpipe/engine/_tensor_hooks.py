"""Detect whether layers register hooks on tensors. Autograd does not tell which of its nodes have hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class TensorHooks(TorchFunctionMode):
    """A context in which hooks that this thread registers on tensors are noticed.

    Attributes:
        seen: whether a hook was registered.
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
        self.seen = self.seen or function is Tensor.register_hook
        return function(*args, **(kwargs or {}))
