"""Detect hooks that a forward registers on modules and removes before it returns.

Forwards of several micro-batches are in flight at the same time. A module would call the hooks of all of them, and none
of them in a recomputation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ._buffers import outside

_Found = dict[int, tuple[str, dict[int, Any]]]
"""Maps torch's number of a hook to the name of its module, and to the module's dict that contains the hook."""


class Hooks:
    """The hooks that were registered after this object was created, as found at calls of blocks.

    Torch numbers all hooks. So if the forward registers none, the model is not searched.
    """

    def __init__(self, model: nn.Module, blocks: Collection[nn.Module]) -> None:
        self._model, self._blocks = model, blocks
        self._first = RemovableHandle.next_id
        self._outside: list[tuple[str, nn.Module]] | None = None
        self._last: _Found = {}
        self._found: _Found = {}

    def look(self, name: str, block: nn.Module) -> None:
        """Note the hooks in ``block``, which is about to be called.

        Another forward may be using a module outside blocks at this moment. So a hook there is noted only if it remains
        until the next call of a block.
        """
        if RemovableHandle.next_id == self._first:
            return
        self._found.update(self._new([(f"{name}.{inner}".rstrip("."), each) for inner, each in block.named_modules()]))
        if self._outside is None:
            around = {*outside(self._model, self._blocks)}
            self._outside = [pair for pair in self._model.named_modules() if pair[1] in around]
        last, self._last = self._last, self._new(self._outside)
        self._found.update((number, place) for number, place in last.items() if number in self._last)

    def expect_kept(self) -> None:
        """Raise RuntimeError if one of the hooks has been removed."""
        for number, (name, hooks) in self._found.items():
            if number not in hooks:
                raise RuntimeError(
                    f"the forward of {type(self._model).__name__} registers a hook on {name!r} and removes it before "
                    "it returns; forwards of several micro-batches run at a time, so the module would call the hooks "
                    "of all of them: pass it what the hook knows as an argument, or register the hook before the pipe "
                    "runs"
                )

    def _new(self, modules: Iterable[tuple[str, nn.Module]]) -> _Found:
        return {
            number: (name, hooks)
            for name, module in modules
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
            for number in [*hooks]
            if number >= self._first
        }
