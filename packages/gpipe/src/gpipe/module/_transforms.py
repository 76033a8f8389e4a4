"""Refuse transforms and tracers that follow a computation in one thread: they would not see the stages in others."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace

Function = TypeVar("Function", bound=Callable[..., Any])

_PROXY = torch._C._TorchDispatchModeKey.PROXY
_WAY_OUT = "leave it out, or use the plain model: nn.Sequential(OrderedDict(pipe.named_children()))"


def refuse_transforms() -> None:
    """Raise RuntimeError, naming it, inside a transform or tracer that cannot follow the stages of a pipe."""
    level = torch._C._functorch.peek_interpreter_stack()
    if level is not None:
        raise RuntimeError(
            f"a pipe cannot run inside torch.func.{level.key().name.lower()} or what is made of it: its stages run on "
            f"other threads, which take no part; call backward() on what the pipe returns, or {_WAY_OUT}"
        )
    # Also inside a dual level without dual numbers here: any tensor inside the pipe could be one.
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "a pipe has no forward-mode derivatives (torch.autograd.forward_ad, torch.func.jvp, torch.func.linearize): "
            f"tangents would be lost between its stages; call backward() on what the pipe returns, or {_WAY_OUT}"
        )
    tracer = _tracer()
    if tracer:
        raise RuntimeError(
            f"a pipe cannot be traced by {tracer}: what its stages compute on other threads would be missing from the "
            f"graph; trace the layers, or {_WAY_OUT}"
        )


def _tracer() -> str | None:
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch._C._get_dispatch_mode(_PROXY) is not None:
        return "make_fx"
    return "torch.fx" if _symbolic_trace.is_fx_symbolic_tracing() else None


def not_compiled(function: Function) -> Function:
    """``function``, which ``torch.compile`` does not trace."""
    # As torch.compiler.disable, which would import the compiler, and take seconds.
    assert isinstance(function, FunctionType)
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "a pipe runs its stages on other threads, which the compiler does not follow; compile the layers, or "
        + _WAY_OUT
    )
    return function
