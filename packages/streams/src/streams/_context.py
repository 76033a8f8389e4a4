"""The settings of a thread, captured in one thread and applied in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context as Variables
from contextvars import ContextVar, Token, copy_context
from functools import cache, partial
from threading import RLock, Thread
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import _C
from torch.overrides import TorchFunctionMode


class Context:
    """The settings that torch and Python keep for each thread, and that a new thread does not inherit.

    It holds the grad mode, the inference mode, autocast for every device type (whether, to which dtype, and whether
    casts are cached), the saved-tensor hooks that act, the default device and the other torch function modes, and the
    context variables.

    It does not contain settings of the process (default dtype, deterministic flags); other switches of autograd
    (multithreaded backwards, view replay) and ``DisableTorchFunctionSubclass``; torch dispatch modes and profilers,
    which two threads cannot use; a ban of saved-tensor hooks; the current device and streams; the number of intra-op
    threads; and the cores that a thread may run on.

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
        """The context of this thread, now.

        Returns:
            A context that any thread can apply, any number of times.

        Raises:
            RuntimeError: inside ``torch.func`` (``vmap``, ``grad``, ``jvp`` …), whose levels belong to one thread.
        """
        if is_transformed():
            raise RuntimeError(
                "cannot capture the context inside a torch.func transform (vmap, grad, jvp, ...): "
                "another thread cannot take part in it; call the transform inside the work instead"
            )
        return cls()

    @staticmethod
    def plain() -> Context:
        """The context of a thread that has just begun: grad mode on, and nothing else."""
        return _plain()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context manager inside of which this thread has these settings; afterwards it has its own again.

        Context variables that the captured context lacks keep their values. Casts of weights that autocast keeps are
        freed when the last of the threads that apply this context leaves it.
        """
        undos: list[Undo] = []
        try:
            self._enter(undos)
            yield
        finally:
            try:
                while undos:
                    undos.pop()()
            finally:  # an interrupt may come between two of them
                while undos:
                    undos.pop()()

    def over(self, around: Context) -> Callable[[], AbstractContextManager[None]]:
        """What does as :meth:`applied` on threads that are in another context, at less cost if it differs little.

        Args:
            around: the context of these threads. If it has another grad mode and nothing else, only that is set.

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
        """A context manager that keeps autocast's casts of weights while threads enter and leave this context.

        For a thread that waits for the others: each weight is then cast once for all of them.
        """
        return self._cast_users.kept() if self.autocast.nested else nullcontext()

    def _enter(self, undos: list[Undo]) -> None:
        steps: tuple[tuple[Any, Any], ...] = (
            # Modes are switched off first: no mode of either context may see the other changes.
            (enter_modes, ()),
            # Then inference mode, since entering and leaving it sets the grad mode too.
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
    thread = Thread(target=lambda: Variables().run(lambda: found.append(Context())))
    thread.start()
    thread.join()
    return found[0]


Undo: TypeAlias = Callable[[], object]
"""What restores a setting; a function that sets one returns it, or None if nothing was changed."""

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
