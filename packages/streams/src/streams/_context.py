"""The settings of a thread, captured in one thread and applied in another."""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import Context as Variables
from contextvars import copy_context
from functools import cache, partial
from threading import Thread
from types import TracebackType
from typing import Any

import torch

from ._thread_state import (
    WayBack,
    enter_autocast,
    enter_flags,
    enter_grad_mode,
    enter_hooks,
    enter_inference_mode,
    enter_modes,
    enter_variables,
    read_autocast,
    read_flags,
    read_hooks,
    read_modes,
)


class Context:
    """The settings that torch and Python keep for each thread, and that a new thread does not inherit.

    It holds the grad mode, the inference mode, the other switches of autograd (multithreaded backwards, forward-mode
    AD, view replay), autocast for every device type (whether, to which dtype, and whether casts are cached), the
    saved-tensor hooks that act, the default device and the other torch function modes, whether torch functions are
    disabled, and the context variables. :meth:`applied` makes another thread, or the same one later, see the same.

    It does not contain settings of the process (default dtype, deterministic flags); torch dispatch modes and
    profilers, which cannot be used by two threads; the current device and streams; the number of intra-op threads; and
    the cores that a thread may run on.

    >>> with torch.no_grad():
    ...     context = Context.capture()
    >>> with context.applied():
    ...     torch.is_grad_enabled()
    False
    """

    __slots__ = (
        "autocast",
        "flags",
        "function_modes",
        "grad_mode",
        "inference_mode",
        "saved_tensors_hooks",
        "variables",
    )

    def __init__(self) -> None:
        self.grad_mode = torch.is_grad_enabled()
        self.inference_mode = torch.is_inference_mode_enabled()
        self.flags = read_flags()
        self.autocast = read_autocast()
        self.saved_tensors_hooks = read_hooks()
        self.function_modes = read_modes()
        self.variables = copy_context()

    @classmethod
    def capture(cls) -> Context:
        """The context of this thread, now.

        Returns:
            A context that any thread can apply, any number of times.

        Raises:
            RuntimeError: inside ``torch.func`` (``vmap``, ``grad``, ``jvp`` …), whose levels belong to one thread.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                "cannot capture the context inside a torch.func transform (vmap, grad, jvp, ...): "
                "another thread cannot take part in it; call the transform inside the work instead"
            )
        return cls()

    @staticmethod
    def plain() -> Context:
        """The context of a thread that has just begun: grad mode on, and nothing else."""
        return _plain()

    def applied(self, *, keeps_casts: bool = False) -> AbstractContextManager[None]:
        """A context manager inside of which this thread has these settings; afterwards it has its own again.

        Context variables that were not set in the captured context keep their values.

        Args:
            keeps_casts: whether the casts of weights that autocast caches are left when the thread leaves autocast. All
                threads have one cache. Threads that compute together keep them, and whoever waits for them calls
                ``torch.clear_autocast_cache()``.
        """
        return _Applied(self, keeps_casts)


class _Applied(AbstractContextManager[None]):
    """The context manager; it remembers how to restore each setting that it has changed."""

    __slots__ = ("_context", "_keeps_casts", "_undo")

    def __init__(self, context: Context, keeps_casts: bool) -> None:
        self._context = context
        self._keeps_casts = keeps_casts
        self._undo: list[WayBack] = []

    def __enter__(self) -> None:
        try:
            self._change()
        except BaseException:
            self._change_back()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._change_back()

    def _change(self) -> None:
        context = self._context
        steps: tuple[tuple[Any, Any], ...] = (
            # Modes are switched off first: no mode of either context may see the other changes.
            (enter_modes, ()),
            # Inference mode first: leaving it restores the grad mode, the flags and autocast too.
            (enter_inference_mode, context.inference_mode),
            (enter_grad_mode, context.grad_mode),
            (enter_flags, context.flags),
            (partial(enter_autocast, keeps_casts=self._keeps_casts), context.autocast),
            (enter_hooks, context.saved_tensors_hooks),
            (enter_variables, context.variables),
            (enter_modes, context.function_modes),
        )
        for enter, wanted in steps:
            way_back = enter(wanted)
            if way_back is not None:
                self._undo.append(way_back)

    def _change_back(self) -> None:
        while self._undo:
            self._undo.pop()()


@cache
def _plain() -> Context:
    found: list[Context] = []
    thread = Thread(target=lambda: Variables().run(lambda: found.append(Context())))
    thread.start()
    thread.join()
    return found[0]
