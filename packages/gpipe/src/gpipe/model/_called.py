"""Intercept calls of blocks, for the forward of a micro-batch or a replay for the full mini-batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import repeat
from operator import setitem
from typing import Any, Protocol

from torch import nn

from ..module._transforms import not_compiled


class Answering(Protocol):
    """Handles calls of blocks on the thread of a forward."""

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the output of a block.

        Args:
            stage: the stage of the block.
            module, name: the block, and its name in the model.
            function: calls the block itself, including its hooks.
        """


class _Thread(threading.local):
    """The handler of this thread; None inside blocks and outside runs."""

    by: Answering | None = None


_thread = _Thread()


@contextmanager
def answered_by(answering: Answering | None) -> Iterator[None]:
    """Let ``answering`` handle calls of blocks on this thread. For None, blocks compute normally."""
    before, _thread.by = _thread.by, answering
    try:
        yield
    finally:
        _thread.by = before


def is_answered_by(answering: Answering) -> bool:
    """Return whether ``answering`` handles calls of blocks on this thread."""
    return _thread.by is answering


def answered(blocks: Mapping[str, nn.Module], stages: Mapping[nn.Module, int]) -> AbstractContextManager[None]:
    """Intercept each call of a block on threads of forwards. On other threads, blocks compute normally."""
    return intercepted({module: partial(_call, stages[module], module, name) for name, module in blocks.items()})


@contextmanager
def intercepted(calls: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the calls of modules, on all threads.

    Torch looks for a compiled call before it runs the hooks of a module. ``nn.Module.compile`` sets the same attribute.

    Args:
        calls: for each module, the function to call instead. It receives the module's original call and the arguments.
    """
    # The attribute stays afterwards, as None, because a new attribute of a module counts as a change of its state.
    before = [vars(module).setdefault(_CALL, None) for module in calls]
    # Restores them in a single call without Python code, which no signal can interrupt.
    restore: Callable[[], object] = partial(deque, map(setitem, [*map(vars, calls)], repeat(_CALL), before), 0)
    try:
        for (module, call), own in zip(calls.items(), before, strict=True):
            vars(module)[_CALL] = _Interception(call, own or module._call_impl)
        yield
    finally:
        restore()


_CALL = "_compiled_call_impl"


class _Interception(partial[Any]):
    """The call of a module while it is intercepted. A copy of the module is not, even of an RNN, which copies this."""

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> None:
    return None


@not_compiled  # the caller may be compiled: a method around blocks, or a module
def _call(stage: int, module: nn.Module, name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
    by = _thread.by
    if by is None:
        return function(*args, **kwargs)
    return by.call(stage, module, name, function, args, kwargs)
