"""The settings that torch and Python keep for each thread: for each a function that reads it, and one that sets it.

A function that sets returns a function that restores the setting, or None if nothing was changed.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context as Variables
from contextvars import ContextVar, Token
from functools import partial
from threading import RLock
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import _C
from torch.overrides import TorchFunctionMode

Undo: TypeAlias = Callable[[], object]

Modes: TypeAlias = tuple[TorchFunctionMode, ...]
"""The torch function modes, the outermost first; the default device is one of them."""

Hooks: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None
"""A pair of saved-tensor hooks. Pairs nest, but only the innermost acts, so that is what another thread needs."""

DEVICE_TYPES: tuple[str, ...] = tuple(_C._autocast_supported_devices())


def enter_grad_mode(mode: bool) -> Undo:
    # Return a way to restore it even if nothing is changed here: code inside may change it and not restore it.
    undo = partial(torch.set_grad_enabled, torch.is_grad_enabled())
    torch.set_grad_enabled(mode)
    return undo


def enter_inference_mode(mode: bool) -> Undo | None:
    if torch.is_inference_mode_enabled() == mode:
        return None
    guard = torch.inference_mode(mode)
    guard.__enter__()
    return partial(guard.__exit__, None, None, None)


def is_transformed() -> bool:
    return _C._functorch.peek_interpreter_stack() is not None


class Autocast(NamedTuple):
    """The autocast state, one entry of ``enabled`` and ``dtypes`` for each of ``DEVICE_TYPES``."""

    enabled: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    cache: bool
    nested: bool


def read_autocast() -> Autocast:
    # The depth of nesting can only be read by changing it.
    nested = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    # Dtypes matter even if nothing is enabled: a later `torch.autocast(type)` without a dtype uses them.
    enabled, dtypes = map(torch.is_autocast_enabled, DEVICE_TYPES), map(torch.get_autocast_dtype, DEVICE_TYPES)
    return Autocast(tuple(enabled), tuple(dtypes), torch.is_autocast_cache_enabled(), nested)


class CastUsers:
    """Enters the autocast of one context in any number of threads, and counts those that are inside.

    Torch has one cache of casts for all threads, and empties it when a thread leaves its outermost autocast block:
    workers that still compute would cast their weights again. But a kept cast must not be used when its weight has
    changed. So the last thread empties it.
    """

    __slots__ = ("_inside", "_lock")

    def __init__(self) -> None:
        self._inside = 0
        self._lock = RLock()  # reentrant, since the garbage collector may run anything while it is held

    def enter(self, wanted: Autocast) -> Undo | None:
        found = read_autocast()
        if found == wanted:
            return None
        _write_autocast(found, wanted)
        if not wanted.nested:
            return partial(_write_autocast, wanted, found)
        torch.autocast_increment_nesting()
        with self._lock:
            self._inside += 1
        return partial(self._leave, wanted, found)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context in which this thread counts as one that is inside."""
        with self._lock:
            self._inside += 1
        try:
            yield
        finally:
            self._subtract(outermost=True)

    def _leave(self, wanted: Autocast, found: Autocast) -> None:
        self._subtract(outermost=torch.autocast_decrement_nesting() == 0)
        _write_autocast(wanted, found)

    def _subtract(self, *, outermost: bool) -> None:
        with self._lock:
            self._inside -= 1
            if outermost and not self._inside:
                torch.clear_autocast_cache()


def _write_autocast(found: Autocast, wanted: Autocast) -> None:
    for i, kind in enumerate(DEVICE_TYPES):
        if found.enabled[i] != wanted.enabled[i]:
            torch.set_autocast_enabled(kind, wanted.enabled[i])
        if found.dtypes[i] != wanted.dtypes[i]:
            torch.set_autocast_dtype(kind, wanted.dtypes[i])
    torch.set_autocast_cache_enabled(wanted.cache)


def read_hooks() -> Hooks:
    return _C._autograd._top_saved_tensors_default_hooks(True)


def enter_hooks(hooks: Hooks) -> Undo | None:
    if read_hooks() == hooks:
        return None
    return partial(_replace_hooks, _replace_hooks([hooks]))


def _replace_hooks(wanted: Sequence[Hooks]) -> list[Hooks]:
    """Replace the pairs of this thread, and return those that it had; the innermost comes last."""
    found: list[Hooks] = []
    while (pair := read_hooks()) is not None:
        found.append(pair)
        _C._autograd._pop_saved_tensors_default_hooks()
    for pair in filter(None, wanted):
        _C._autograd._push_saved_tensors_default_hooks(*pair)
    return found[::-1]


def read_modes() -> Modes:
    return tuple(map(_C._get_function_stack_at, range(_C._len_torch_function_stack())))


def enter_modes(modes: Modes) -> Undo | None:
    found = read_modes()
    if found == modes:
        return None
    _replace_modes(modes)
    return partial(_replace_modes, found)


def _replace_modes(modes: Modes) -> None:
    # Not by `with mode`: its __enter__ may have other effects, and that of a default device reorders the stack.
    for _ in range(_C._len_torch_function_stack()):
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


def enter_variables(variables: Variables) -> Undo | None:
    """Set the context ``variables`` one by one: two threads cannot enter a ``contextvars.Context`` at the same time."""
    tokens = [(var, var.set(value)) for var, value in variables.items() if var.get(_UNSET) is not value]
    return partial(_reset_variables, tokens) if tokens else None


_UNSET = object()


def _reset_variables(tokens: list[tuple[ContextVar[Any], Token[Any]]]) -> None:
    for var, token in reversed(tokens):
        var.reset(token)
