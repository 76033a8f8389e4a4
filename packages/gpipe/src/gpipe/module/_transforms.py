"""Refuse transforms and tracers that follow a computation in one thread: they would not see the stages in others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .. import _torch
from ..engine._settings import settings

Function = TypeVar("Function", bound=Callable[..., Any])

_WAY_OUT = "leave it out, or use the plain model: pipe[:]"


def refuse_transforms() -> None:
    """Raise RuntimeError, naming it, inside a transform or tracer that cannot follow the stages of a pipe."""
    transform = _torch.transform()
    if transform is not None:
        raise RuntimeError(
            f"a pipe cannot run inside {transform} or what is made of it, which would not see its stages on other "
            f"threads; call backward() on what the pipe returns, transform or trace the layers, or {_WAY_OUT}"
        )
    if _torch.watches_operations() and not settings().inline:
        raise RuntimeError(
            "a TorchDispatchMode is active, such as a FLOP counter, which would see no operation of the stages: they "
            "run on other threads; run the pipe under gpipe.inline() there, or leave the mode out"
        )


def not_compiled(function: Function) -> Function:
    reason = "a pipe runs its stages on other threads, which the compiler does not follow; compile the layers, or "
    return _torch.not_compiled(function, reason + _WAY_OUT)
