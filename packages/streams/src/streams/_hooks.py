"""The saved-tensor hooks of a thread. They nest, but only the innermost pair acts, so that is what another needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Hooks: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | str | None
"""The pair that acts, or why hooks are forbidden here, or ``None``."""

_state = torch._C._autograd


def read() -> Hooks:
    """What acts on this thread."""
    pair = _state._top_saved_tensors_default_hooks(True)
    return pair if pair is not None else _state._saved_tensors_hooks_get_disabled_error_message()


def enter(hooks: Hooks) -> Callable[[], None] | None:
    """Let ``hooks`` alone act on this thread; the way back, or ``None`` if there was nothing to change."""
    if read() == hooks:
        return None
    found = _take_all()
    _put(hooks)

    def undo() -> None:
        _take_all()
        for each in found:
            _put(each)

    return undo


def _take_all() -> list[Hooks]:
    """Leave none; those that were there, the innermost last."""
    taken: list[Hooks] = []
    while (hooks := read()) is not None:
        taken.append(hooks)
        if isinstance(hooks, str):
            _state._saved_tensors_hooks_enable()
        else:
            _state._pop_saved_tensors_default_hooks()
    return taken[::-1]


def _put(hooks: Hooks) -> None:
    if isinstance(hooks, str):
        _state._saved_tensors_hooks_disable(hooks)
    elif hooks is not None:
        _state._push_saved_tensors_default_hooks(*hooks)
