"""Reject transforms and tracers that see only one thread, and so would miss the stages on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .. import _torch
from ..engine._settings import settings

Function = TypeVar("Function", bound=Callable[..., Any])

_WAY_OUT = "omit it, or use the plain model: pipe[:]"


def refuse_transforms() -> None:
    """Raise RuntimeError inside a transform or tracer that cannot follow the stages of a pipe."""
    transform = _torch.transform()
    if transform is not None:
        raise RuntimeError(
            f"a pipe cannot run inside {transform} or anything built on it, because its stages run on other threads; "
            f"call backward() on the output of the pipe, transform or trace the layers, or {_WAY_OUT}"
        )
    if _torch.watches_operations() and not settings().inline:
        raise RuntimeError(
            "a TorchDispatchMode is active, such as a FLOP counter, which would miss all operations of the stages, "
            "because they run on other threads; run the pipe under gpipe.inline(), or omit the mode"
        )


def not_compiled(function: Function) -> Function:
    reason = "a pipe runs its stages on other threads, which the compiler cannot trace; compile the layers, or "
    return _torch.not_compiled(function, reason + _WAY_OUT)
