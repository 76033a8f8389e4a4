"""The private names of torch that gpipe calls, each with its reason and with what happens without it.

Tests of pipes fail where torch changes one of them, or ``tests/test_torch.py`` does. Attributes of tensors and modules,
such as ``_version`` and ``_modules``, are used where they are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType
from typing import Any, Final, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload as OpOverload
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.nn.utils import parametrize

Function = TypeVar("Function", bound=Callable[..., Any])

# Backwards. Without them: torch.autograd.backward and grad, whose checks take longer than the backward of a small cell.

run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
"""Autograd's engine, called without checks."""

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that this thread is in; -1 if it is in none. Without it: draws in a backward, which a
recomputation cannot repeat, would not be refused."""

saved_tensors_hooks: Callable[[], object] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
"""The hooks through which this thread saves tensors for a backward; None if there are none. Without it: a split
backward would call them twice, which repeats what ``torch.utils.checkpoint`` computes again."""


def used_by_graphs(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those to which more refers than Python, such as a graph. Without it: every run asks each for its node."""
    return [parameter for parameter in parameters if parameter._use_count() > 1]  # type: ignore[attr-defined]


# Classes of tensors.

no_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""A context in which results are not of a class of tensors because arguments are. Without it: what is made of the sizes
of a placeholder would count as computed from its values."""

no_torch_dispatch: Callable[[], AbstractContextManager[Any]] = torch._C._DisableTorchDispatch
"""A context in which operations take a tensor of a class for a plain one. Without it: a placeholder would have to keep
a plain tensor beside it, which does not follow where its data is moved."""


def with_lost_weight(function: Callable[..., Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keywords that torch gives to a function mode, with the ``weight`` that ``F.l1_loss`` does not pass on.

    Without it: a weighted loss would be computed without weights, where a function mode is on.
    """
    found = dict(kwargs or {})
    if function is F.l1_loss and "weight" not in found:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code is not F.l1_loss.__code__:
            frame = frame.f_back
        found["weight"] = frame.f_locals.get("weight") if frame.f_code is F.l1_loss.__code__ else None
    return found


# Interception of operations that draw. Without these names: a TorchDispatchMode, through which every operation passes;
# a step of a small GPT-2 then takes 1.25 times as long.

INTERCEPTING: Final = "DeferredInit"
"""A dispatch key for extensions of torch. The only known one that used it, torchdistx, is no longer developed."""

_KEY: Final = torch._C._dispatch_key_parse(INTERCEPTING)

is_intercepting: Callable[[], bool] = partial(torch._C._dispatch_tls_is_dispatch_key_included, _KEY)
"""Whether operations of this thread pass the key."""

set_intercepting: Callable[[bool], None] = partial(torch._C._dispatch_tls_set_dispatch_key_included, _KEY)
"""Have the operations of this thread pass the key, or not."""


def is_intercepted_by_others() -> bool:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(INTERCEPTING)
    return bool(registered) or torch._C._dispatch_has_backend_fallback(_KEY)


operation_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
"""The names of all operations, also of other libraries."""


def has_tag(name: str, tag: torch.Tag) -> bool:
    """Whether the operation of that name has the tag. ``torch.ops`` would make an object of each of thousands."""
    packet, _, overload = name.partition(".")
    found = torch._C._get_operation_overload(packet, overload)
    return found is not None and tag in found[2]  # libraries may implement operations that nobody has defined


def is_composite(operation: OpOverload) -> bool:
    """Whether the operation consists of other ones, which are intercepted themselves."""
    return operation.has_kernel_for_dispatch_key("CompositeImplicitAutograd")  # type: ignore[arg-type]


def below_interception(keys: torch._C.DispatchKeySet, operation: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Execute the operation as if it had not been intercepted, while its component operations still are."""
    if not is_faked():
        return operation.redispatch(keys.remove(_KEY), *args, **kwargs)
    # A compiler's dispatcher in Python would come back here. Without values, no component draws.
    set_intercepting(False)
    try:
        return operation(*args, **kwargs)
    finally:
        set_intercepting(True)


# Settings of the process that layers set for a time. Without these names: a layer of one stage would set them for those
# of all others, and two that set them at the same time might leave them changed.

_ATTENTION: Final = [
    (getattr(torch._C, getter), getattr(torch._C, setter), getter, setter)
    for getter, setter in [
        *[(f"_get_{k}_sdp_enabled", f"_set_sdp_use_{k}") for k in ("cudnn", "flash", "mem_efficient", "math")],
        *[(f"_get_{k}_sdp_enabled", f"_set_sdp_use_{k}") for k in ("overrideable", "fa3")],
        ("_get_sdp_priority_order", "_set_sdp_priority_order"),
        ("_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"),
    ]
    if hasattr(torch._C, setter)
]
"""The functions that read and set which kernels compute attention, as ``torch.nn.attention.sdpa_kernel`` does."""


def attention_settings() -> tuple[Any, ...]:
    """Which kernels compute attention in this process."""
    return tuple([read() for read, *_ in _ATTENTION])


def set_attention(settings: Mapping[int, Any]) -> None:
    """Set the entries of these indices."""
    for k, value in settings.items():
        _ATTENTION[k][1](value)


def route_attention(read: Callable[[int], Any], write: Callable[[int, Any], None]) -> None:
    """Let whoever reads or sets an entry of these settings call ``read`` or ``write`` with its index."""
    for k, (_, _, getter, setter) in enumerate(_ATTENTION):
        setattr(torch._C, getter, partial(read, k))
        setattr(torch._C, setter, partial(write, k))


def parametrized_cache() -> tuple[Any, Any]:
    """How many are inside of ``parametrize.cached()``, and the tensors that it keeps for them."""
    return parametrize._cache_enabled, parametrize._cache


def set_parametrized_cache(users: Any, cache: Any) -> None:
    parametrize._cache_enabled, parametrize._cache = users, cache


def replace_cached(function: Callable[[], Iterator[None]]) -> None:
    """Let ``parametrize.cached()`` enter ``function``, also for those that have imported it by its name."""
    cached: Any = parametrize.cached
    cached.__closure__[cached.__code__.co_freevars.index("func")].cell_contents = function


# Transforms and tracers. Without these names: a pipe inside of one gives a wrong graph instead of an error.

_MODES: Final = torch._C._TorchDispatchModeKey
_has_mode = torch._C._get_dispatch_mode


def is_faked() -> bool:
    """Whether operations of this thread are traced or have no values, so that they draw nothing."""
    return any(_has_mode(mode) is not None for mode in (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL))


def transform() -> str | None:
    """The name of a transform or tracer that this thread is inside of."""
    level: Any = torch._C._functorch.peek_interpreter_stack()
    if level is not None:
        return f"torch.func.{level.key().name.lower()}"
    # Also without dual numbers here: any tensor that a layer has could be one.
    if forward_ad._current_level >= 0:
        return "torch.autograd.forward_ad"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    if _has_mode(_MODES.PROXY) is not None:
        return "make_fx"
    return "torch.fx" if _symbolic_trace.is_fx_symbolic_tracing() else None


def watches_operations() -> bool:
    """Whether a ``TorchDispatchMode`` sees this thread's operations. Without it: it would see none of the stages."""
    return torch._C._len_torch_dispatch_stack() > 0


def dispatch_modes() -> list[Any]:
    """The modes that see this thread's operations. Without it: they would see no operation of a model's own forward,
    which runs on another thread."""
    return [torch._C._get_dispatch_stack_at(k) for k in range(torch._C._len_torch_dispatch_stack())]


@contextmanager
def with_dispatch_modes(modes: Iterable[Any]) -> Iterator[None]:
    """A context in which these modes of a thread that waits see the operations of this one."""
    pushed = []
    try:
        for mode in modes:
            push_dispatch_mode(mode)
            pushed.append(mode)
        yield
    finally:
        for mode in reversed(pushed):
            pop_dispatch_mode(getattr(mode, "_mode_key", None))


push_dispatch_mode: Callable[[Any], None] = torch._C._push_on_torch_dispatch_stack
pop_dispatch_mode: Callable[[Any], Any] = torch._C._pop_torch_dispatch_stack


def not_compiled(function: Function, reason: str) -> Function:
    """``function``, which ``torch.compile`` does not trace; ``torch.compiler.disable`` would take seconds to import."""
    assert isinstance(function, FunctionType)
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


# Others.


def device_in(*args: Any, **kwargs: Any) -> torch.device | None:
    """The device in arguments of ``Module.to``. Without it: ``pipe.to(device)`` would move all stages to one device."""
    device: torch.device | None = torch._C._nn._parse_to(*args, **kwargs)[0]
    return device


def stay_in_place(module: nn.Module) -> None:
    """Let ``to`` leave a module that has no data as it is. Torch swaps the tensors of such a module, which fails where
    something refers to them weakly. Without it: no step with parametrized layers could be tried without data."""
    vars(module)["_apply"] = lambda *_: module


swap_implementations: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl
"""Exchange what two tensors are, but not who they are. ``torch.utils.swap_tensors`` refuses tensors with weak
references, such as the weights of an LSTM. Without it: parameters made on ``meta`` would be replaced by others."""


def is_profiled() -> bool:
    """Whether a profiler of torch is on. Without it: every action of every run would be labelled."""
    return torch.autograd.profiler._is_profiler_enabled


# Torch function modes of a thread. Without these names: a mode that looks at operations between blocks would also take
# its time for each operation inside of them.

push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack


def top_function_mode() -> Any:
    """The innermost mode of this thread, or None."""
    depth = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(depth - 1) if depth else None


next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""The number that the next node of a graph in this thread will have. Each thread counts its own. Without it: it would
not be known on which stage a tensor was computed that a block has left in an attribute."""
