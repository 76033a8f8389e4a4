"""Make the choice of attention kernels (``torch.nn.attention.sdpa_kernel``) local to the threads of pipes.

The choice in torch is global to the process. A layer that changes it temporarily would also change it for stages that
run concurrently, and their recomputations would use different kernels. If two such layers overlap, the one that
restores it last may restore the other layer's choice. So a thread of a pipe only stores its choice, in a context
variable. An attention applies it to the process while it runs, and attentions with different choices run in turn.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch.library import Library

from streams import waiting

from .._forks import fork_lock
from .._torch import (
    INTERCEPTING,
    attention_settings,
    below_interception,
    is_intercepting,
    route_attention,
    set_attention,
)

Kernels = tuple[Any, ...] | None
"""A choice of kernels; None for the process-wide choice."""

_chosen: ContextVar[Kernels] = ContextVar("gpipe.kernels", default=None)


class _Thread(threading.local):
    """Stores whether this thread is inside an attention."""

    is_inside = False


_thread = _Thread()


class _Turns:
    """Allow attentions to run concurrently only if they use the same choice of kernels."""

    def __init__(self) -> None:
        self._lock = fork_lock()
        self._changed = waiting.Condition(self._lock)
        self._running: set[object] = set()
        self._now: Kernels = None
        self._of_process: tuple[Any, ...] = ()

    @contextmanager
    def of(self, kernels: Kernels) -> Iterator[None]:
        """Return a context in which this choice applies to the process."""
        if _thread.is_inside:
            yield
            return
        turn = object()
        try:
            self._begin(turn, kernels)
            _thread.is_inside = True
            yield
        finally:
            try:
                self._end(turn)
            finally:  # again after an interrupt, because other choices would otherwise wait forever
                self._end(turn)

    def _begin(self, turn: object, kernels: Kernels) -> None:
        with self._lock:
            while self._running and self._now != kernels:
                self._changed.wait()
            is_first = not self._running
            self._running.add(turn)  # first, because its end then restores the rest after an interrupt
            if kernels is None:
                return
            if is_first:
                self._of_process = attention_settings()
            self._now = kernels
            set_attention(dict(enumerate(kernels)))  # also with other turns, whose end may have been interrupted

    def _end(self, turn: object) -> None:
        """End a turn, if it has begun and has not ended yet."""
        _thread.is_inside = False
        with self._lock:
            if self._running == {turn}:
                self._restore()
            self._running.discard(turn)
            if not self._running:
                self._changed.notify_all()

    def _restore(self) -> None:
        if self._now is not None:
            set_attention(dict(enumerate(self._of_process)))
        self._now = None

    def begin_in_child(self) -> None:
        """Reset the state after a fork, since the threads that run attentions do not exist in the child."""
        self._restore()
        self._running.clear()


_turns = _Turns()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_turns.begin_in_child)


def chosen_kernels() -> Kernels:
    """Return the choice of this thread of a pipe."""
    return _chosen.get()


@contextmanager
def own_kernels(kernels: Kernels) -> Iterator[None]:
    """Return a context in which this thread of a pipe uses ``kernels``."""
    before = _chosen.get()
    try:
        _chosen.set(kernels)
        yield
    finally:
        _chosen.set(before)


@cache
def prepare() -> None:
    """Give threads of pipes their own choices from now on.

    The dispatch key of intercepted operations must already have its fallback: see :mod:`gpipe.checkpoint._operations`.
    """
    _libraries.append(Library("aten", "IMPL", INTERCEPTING))  # type: ignore[no-untyped-call]
    _libraries[0].impl(_ATTENTION, _attend, with_keyset=True)  # type: ignore[no-untyped-call]
    route_attention(_read, _write)


_libraries: list[Library] = []  # keep the kernels registered
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def _attend(keys: Any, *args: Any, **kwargs: Any) -> Any:
    with _turns.of(_chosen.get()):
        return below_interception(keys, _ATTENTION, *args, **kwargs)


def _read(k: int) -> Any:
    own = _chosen.get() if is_intercepting() else None
    return _settings_of_process()[k] if own is None else own[k]


def _write(k: int, value: Any) -> None:
    if not is_intercepting():
        with _turns.of(None):
            set_attention({k: value})
        return
    of_process = _settings_of_process()
    own = _chosen.get() or of_process
    changed = (*own[:k], value, *own[k + 1 :])
    _chosen.set(None if changed == of_process else changed)


def _settings_of_process() -> tuple[Any, ...]:
    with _turns.of(None):
        return attention_settings()
