"""The settings of a thread, captured in one thread and applied in another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context as Variables
from contextvars import copy_context
from functools import cache, partial
from threading import Thread
from typing import Any

import torch

from . import _settings


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
        self.autocast = _settings.read_autocast()
        self.saved_tensors_hooks = _settings.read_hooks()
        self.function_modes = _settings.read_modes()
        self.variables = copy_context()
        self._cast_users = _settings.CastUsers()

    @classmethod
    def capture(cls) -> Context:
        """The context of this thread, now.

        Returns:
            A context that any thread can apply, any number of times.

        Raises:
            RuntimeError: inside ``torch.func`` (``vmap``, ``grad``, ``jvp`` …), whose levels belong to one thread.
        """
        if _settings.is_transformed():
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
        undos: list[_settings.Undo] = []
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

    def _enter(self, undos: list[_settings.Undo]) -> None:
        steps: tuple[tuple[Any, Any], ...] = (
            # Modes are switched off first: no mode of either context may see the other changes.
            (_settings.enter_modes, ()),
            # Then inference mode, since entering and leaving it sets the grad mode too.
            (_settings.enter_inference_mode, self.inference_mode),
            (_settings.enter_grad_mode, self.grad_mode),
            (self._cast_users.enter, self.autocast),
            (_settings.enter_hooks, self.saved_tensors_hooks),
            (_settings.enter_variables, self.variables),
            (_settings.enter_modes, self.function_modes),
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
