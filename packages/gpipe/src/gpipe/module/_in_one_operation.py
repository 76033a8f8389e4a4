"""Call a pipe between the blocks of another pipe's model, where all operations are handled by a mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from .._torch import function_modes


class HandlesPipes(TorchFunctionMode):
    """A mode that handles the operations of a model. A pipe is one of them."""

    def call(self, compute: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call ``compute``, which runs a pipeline."""
        raise NotImplementedError


def in_one_operation(compute: Callable[..., Any], *args: Any) -> Any:
    """Call ``compute``, which runs a pipeline. Between blocks of another pipe's model, this is a single operation."""
    mode = next((each for each in function_modes() if isinstance(each, HandlesPipes)), None)
    return compute(*args) if mode is None else mode.call(compute, args)
