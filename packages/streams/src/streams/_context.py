"""What a thread sees of torch, taken from one thread and given to another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from threading import Thread
from types import TracebackType

import torch

from . import _autocast, _flags, _hooks, _modes, _variables


class Context:
    """The state that torch and Python keep per thread, and that a new thread therefore does not have.

    It holds the grad mode, the inference mode, the other switches of autograd (multithreaded backwards, forward-mode
    AD, view replay), autocast for every device type (whether, to which dtype, and whether casts are cached), the
    saved-tensor hooks that act, the default device and the other torch function modes, whether torch functions are
    disabled, and the context variables. :meth:`applied` makes another thread, or the same one later, see the same.

    Not part of it: what is process-wide anyway (default dtype, deterministic flags), torch dispatch modes and
    profilers, which do not bear two threads, the current device and streams, the number of intra-op threads, and the
    processor cores that a thread may run on.

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
        self.flags = _flags.read()
        self.autocast = _autocast.read()
        self.saved_tensors_hooks = _hooks.read()
        self.function_modes = _modes.read()
        self.variables = _variables.read()

    @classmethod
    def capture(cls) -> Context:
        """The context of this thread, now.

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

    def applied(self) -> AbstractContextManager[None]:
        """A block in which this thread sees the context, whatever it saw before; afterwards it sees that again.

        Context variables are the exception: those that the context does not have keep their values.
        """
        return _Applied(self)


class _Applied(AbstractContextManager[None]):
    """The block; it keeps a way back for each thing that it had to change."""

    __slots__ = ("_context", "_undo")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._undo: list[Callable[[], None]] = []

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
        # No mode, neither of these nor of those, shall see the changes in between.
        self._keep(_modes.enter(()))
        # Inference mode before the others: its end restores the grad mode, the switches and the autocast flags too.
        if torch.is_inference_mode_enabled() != context.inference_mode:
            self._keep(_enter_inference_mode(context.inference_mode))
        # Grad mode and switches even if there is nothing to change: what happens inside may change them for good.
        self._undo.append(partial(torch._C._set_grad_enabled, torch.is_grad_enabled()))
        torch._C._set_grad_enabled(context.grad_mode)
        self._undo.append(_flags.enter(context.flags))
        self._keep(_autocast.enter(context.autocast))
        self._keep(_hooks.enter(context.saved_tensors_hooks))
        self._keep(_variables.enter(context.variables))
        self._keep(_modes.enter(context.function_modes))

    def _keep(self, way_back: Callable[[], None] | None) -> None:
        if way_back is not None:
            self._undo.append(way_back)

    def _change_back(self) -> None:
        while self._undo:
            self._undo.pop()()


def _enter_inference_mode(mode: bool) -> Callable[[], None]:
    guard = torch._C._InferenceMode(mode)
    guard.__enter__()  # type: ignore[no-untyped-call]
    return partial(guard.__exit__, None, None, None)


@cache
def _plain() -> Context:
    found: list[Context] = []
    thread = Thread(target=lambda: _variables.Variables().run(lambda: found.append(Context())))
    thread.start()
    thread.join()
    return found[0]
