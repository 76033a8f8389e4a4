"""Capture the settings of one thread and apply them in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context as Variables
from contextvars import ContextVar, Token, copy_context
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import _C
from torch.overrides import TorchFunctionMode

from . import _waiting as waiting


class Context:
    """The thread-local settings of torch and Python, which a new thread does not inherit.

    A context contains the grad mode, the inference mode, the autocast state of every device type (enabled, dtype, cast
    cache), the innermost saved-tensor hooks, the default device and the other torch function modes, and the context
    variables.

    It does not contain process-wide settings (default dtype, deterministic flags), other switches of autograd
    (multithreaded backwards, view replay), ``DisableTorchFunctionSubclass``, torch dispatch modes and profilers (which
    threads cannot share), a ban of saved-tensor hooks, the current device and streams, the number of intra-op threads,
    or the CPU affinity.

    >>> with torch.no_grad():
    ...     context = Context.capture()
    >>> with context.applied():
    ...     torch.is_grad_enabled()
    False
    """

    def __init__(self) -> None:
        self.grad_mode = torch.is_grad_enabled()
        self.inference_mode = torch.is_inference_mode_enabled()
        self.autocast = read_autocast()
        self.saved_tensors_hooks = read_hooks()
        self.function_modes = read_modes()
        self.variables = copy_context()
        self._cast_users = CastUsers()

    @classmethod
    def capture(cls) -> Context:
        """Capture the current settings of this thread.

        Returns:
            A context that any thread can apply, any number of times.

        Raises:
            RuntimeError: a ``torch.func`` transform (``vmap``, ``grad``, ``jvp`` …) is active; its levels belong to one
                thread.
        """
        if is_transformed():
            raise RuntimeError(
                "cannot capture the context inside a torch.func transform (vmap, grad, jvp, ...): "
                "other threads cannot join it; call the transform inside the work instead"
            )
        return cls()

    @staticmethod
    def plain() -> Context:
        """Return the context of a new thread: grad mode on, and defaults otherwise."""
        return _plain()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply these settings to the current thread inside a ``with`` block.

        Context variables that the captured context lacks keep their values. Autocast's cached casts of weights are
        freed when the last thread leaves this context.
        """
        undos: list[Undo] = []
        try:
            self._enter(undos)
            yield
        finally:
            try:
                while undos:
                    undos.pop()()
            finally:  # an interrupt may arrive between two of them
                while undos:
                    undos.pop()()

    def over(self, around: Context) -> Callable[[], AbstractContextManager[None]]:
        """Return a cheaper :meth:`applied`, for threads that are already in the context ``around``.

        Args:
            around: the context of these threads. If it differs at most in the grad mode, only the grad mode is set.

        Returns:
            A function that returns a context manager.
        """
        others = around.variables
        has_variables = all(var in others and others[var] is value for var, value in self.variables.items())
        alike = has_variables and self._but_grad_mode == around._but_grad_mode
        return partial(torch.set_grad_enabled, self.grad_mode) if alike else self.applied

    @property
    def _but_grad_mode(self) -> tuple[Any, ...]:
        return self.inference_mode, self.autocast, self.saved_tensors_hooks, self.function_modes

    def casts_kept(self) -> AbstractContextManager[None]:
        """Keep autocast's casts of weights inside a ``with`` block while threads enter and leave this context.

        Use it in the thread that waits for the other threads, so that each weight is cast once for all of them.
        """
        return self._cast_users.kept() if self.autocast.nested else nullcontext()

    def _enter(self, undos: list[Undo]) -> None:
        steps: tuple[tuple[Any, Any], ...] = (
            # Disable function modes first, so that no mode of either context intercepts the other changes.
            (enter_modes, ()),
            # Then set inference mode, because entering and leaving it also sets the grad mode.
            (enter_inference_mode, self.inference_mode),
            (enter_grad_mode, self.grad_mode),
            (self._cast_users.enter, self.autocast),
            (enter_hooks, self.saved_tensors_hooks),
            (enter_variables, self.variables),
            (enter_modes, self.function_modes),
        )
        for enter, wanted in steps:
            undo = enter(wanted)
            if undo is not None:
                undos.append(undo)


@cache
def _plain() -> Context:
    found: list[Context] = []
    thread = waiting.Thread(target=lambda: Variables().run(lambda: found.append(Context())))
    thread.start()
    thread.join()
    return found[0]


Undo: TypeAlias = Callable[[], object]
"""A function that restores a setting. Functions that change a setting return one, or None if nothing has changed."""

Modes: TypeAlias = tuple[TorchFunctionMode, ...]
"""The torch function modes, outermost first; the default device is one of them."""

Hooks: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None
"""A pair of saved-tensor hooks. Pairs nest, but only the innermost pair is active, so other threads need only this."""

DEVICE_TYPES: tuple[str, ...] = tuple(_C._autocast_supported_devices())


def enter_grad_mode(mode: bool) -> Undo:
    # Restore it even if nothing changes here, because code inside the block may change it without restoring it.
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
    """The autocast state; ``enabled`` and ``dtypes`` have one entry per type in ``DEVICE_TYPES``."""

    enabled: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    cache: bool
    nested: bool


def read_autocast() -> Autocast:
    # The nesting depth can only be read by changing it.
    nested = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    # Dtypes matter even if nothing is enabled: a later `torch.autocast(type)` without a dtype uses them.
    enabled, dtypes = map(torch.is_autocast_enabled, DEVICE_TYPES), map(torch.get_autocast_dtype, DEVICE_TYPES)
    return Autocast(tuple(enabled), tuple(dtypes), torch.is_autocast_cache_enabled(), nested)


class CastUsers:
    """Enter the autocast state of one context in any number of threads, and count the threads inside.

    Torch has one cast cache for all threads, and clears it when a thread leaves its outermost autocast block. Workers
    that still compute would then cast their weights again. But a cast must not outlive a change of its weight, so the
    last thread clears the cache.
    """

    __slots__ = ("_inside", "_lock")

    def __init__(self) -> None:
        self._inside = 0
        self._lock = waiting.RLock()  # reentrant, because the garbage collector may run any code while it is held

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
        """Count this thread as one inside during a ``with`` block."""
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
    """Replace the pairs of this thread, and return the previous pairs, innermost last."""
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
    # `with mode` would call __enter__, which may have side effects; a default device's __enter__ reorders the stack.
    for _ in range(_C._len_torch_function_stack()):
        _C._pop_torch_function_stack()
    for mode in modes:
        _C._push_on_torch_function_stack(mode)


def enter_variables(variables: Variables) -> Undo | None:
    """Set context variables one by one, because two threads cannot be in the same ``contextvars.Context``."""
    tokens = [(var, var.set(value)) for var, value in variables.items() if var.get(_UNSET) is not value]
    return partial(_reset_variables, tokens) if tokens else None


_UNSET = object()


def _reset_variables(tokens: list[tuple[ContextVar[Any], Token[Any]]]) -> None:
    for var, token in reversed(tokens):
        var.reset(token)
