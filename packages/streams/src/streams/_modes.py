"""The torch function modes of a thread, the default device among them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

Modes = tuple[TorchFunctionMode, ...]


def read() -> Modes:
    """The modes of this thread, the outermost first."""
    return tuple(map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack())))


def enter(modes: Modes) -> Callable[[], None] | None:
    """Give this thread exactly ``modes``; the way back, or ``None`` if there was nothing to change."""
    found = read() if torch._C._len_torch_function_stack() else ()
    if found == modes:
        return None
    _replace(modes)
    return lambda: _replace(found)


def _replace(modes: Modes) -> None:
    # Not `with mode`: a mode's own entry may have effects of its own, and that of a default device reorders the stack.
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)
