"""Who answers when the forward of a model calls a block: the forward of a micro-batch, or a replay for all rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import nn


class Answering(Protocol):
    """Answers calls of blocks in the thread of a forward."""

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the output of a block.

        Args:
            stage: the stage of the block.
            module, name: the block, and its name in the model.
            function: calls the block itself, with its hooks.
        """


class _Thread(threading.local):
    """Who answers in this thread; None inside of blocks, and outside of runs."""

    by: Answering | None = None


_thread = _Thread()


@contextmanager
def answered_by(answering: Answering | None) -> Iterator[None]:
    """Have ``answering`` answer the calls of blocks in this thread; for None blocks compute as ever."""
    before, _thread.by = _thread.by, answering
    try:
        yield
    finally:
        _thread.by = before


@contextmanager
def answered(blocks: Mapping[str, nn.Module], stages: Mapping[nn.Module, int]) -> Iterator[None]:
    """Inside, threads of forwards are asked before each call of a block; other threads compute as ever.

    torch looks for a compiled call before the hooks of a module; ``nn.Module.compile`` sets the same attribute.
    """
    # The name stays in the module afterwards, as None: what is added to a module counts as a change of its state.
    before = {module: vars(module).setdefault("_compiled_call_impl", None) for module in blocks.values()}
    try:
        for name, module in blocks.items():
            function = before[module] or module._call_impl
            vars(module)["_compiled_call_impl"] = partial(_call, stages[module], module, name, function)
        yield
    finally:
        for module, own in before.items():
            vars(module)["_compiled_call_impl"] = own


def _call(stage: int, module: nn.Module, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    by = _thread.by
    if by is None:
        return function(*args, **kwargs)
    return by.call(stage, module, name, function, args, kwargs)
