"""Private PyTorch names that gpipe uses, why each is needed, and what breaks without it.

If torch changes one of them, tests of pipes or ``tests/test_torch.py`` fail. Private attributes of tensors and modules,
such as ``_version`` and ``_modules``, are not listed here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

# Backwards. Without these names: torch.autograd.backward() and grad(), whose checks take longer than a small cell's
# backward.

run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
"""Runs autograd's engine without checks."""

backward_id: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the ID of the backward that this thread is in, or -1. Without it: random numbers drawn in a backward, which
a recomputation cannot repeat, would raise no error."""

saved_tensors_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
"""Returns this thread's hooks for saved tensors, or None. Without it: a split backward would call them twice, and so
repeat recomputations of ``torch.utils.checkpoint``."""

no_function_modes: Any = torch._C.DisableTorchFunction
"""A context in which no torch function mode is called. Without it: a hook for saved tensors, which runs in the middle
of an operation, would look like an operation of the model."""

no_dispatch_modes: Any = torch._C._DisableTorchDispatch
"""A context in which no dispatch mode is called. Without it: a mode that counts the bytes of activations would count
their copies on the host."""


def find_used_by_graphs(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that are also referenced from C++, such as by a graph.

    Without it: every run would look up the node of every parameter.
    """
    return [parameter for parameter in parameters if parameter._use_count() > 1]  # type: ignore[attr-defined]


# Wrappers.

READ_BY_DATA_PARALLEL: Final = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module that ``DistributedDataParallel`` reads in its constructor, before it broadcasts parameters.
Without it: wrapping a rank of a pipe would replace the weights of its stages by those of other stages."""

SET_BY_FSDP: Final = "_is_fsdp_managed_module"
"""The attribute that ``FullyShardedDataParallel`` sets on all modules that it wraps, before it flattens parameters.
``fully_shard`` sets it after it has sharded them. Without it: wrapping a rank would shard different stages as one."""


# Tensor subclasses.


def with_lost_weight(function: Callable[..., Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a function mode's keyword arguments, with the ``weight`` that ``F.l1_loss`` does not pass on.

    Without it: a weighted loss would be computed without its weights under a function mode.
    """
    found = dict(kwargs or {})
    if function is F.l1_loss and "weight" not in found:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code is not F.l1_loss.__code__:
            frame = frame.f_back
        found["weight"] = frame.f_locals.get("weight") if frame.f_code is F.l1_loss.__code__ else None
    return found


# Interception of random operations. Without these names: a TorchDispatchMode, which intercepts every operation, so that
# a step of a small GPT-2 takes 1.25 times as long.

INTERCEPTING: Final = "DeferredInit"
"""A dispatch key for extensions of torch. The only known user, torchdistx, is no longer developed."""

_KEY: Final = torch._C._dispatch_key_parse(INTERCEPTING)

is_intercepting: Callable[[], bool] = partial(torch._C._dispatch_tls_is_dispatch_key_included, _KEY)
"""Returns whether this thread's operations are dispatched to the key."""

set_intercepting: Callable[[bool], None] = partial(torch._C._dispatch_tls_set_dispatch_key_included, _KEY)
"""Sets whether this thread's operations are dispatched to the key."""


def is_intercepted_by_others() -> bool:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(INTERCEPTING)
    return bool(registered) or torch._C._dispatch_has_backend_fallback(_KEY)


operation_names: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
"""Returns the names of all operations, including those of other libraries."""


def has_tag(name: str, tag: torch.Tag) -> bool:
    """Return whether the operation ``name`` has the tag. ``torch.ops`` would create thousands of objects for this."""
    packet, _, overload = name.partition(".")
    found = torch._C._get_operation_overload(packet, overload)
    return found is not None and tag in found[2]  # None if a library implements an operation that is not defined


def is_composite(operation: OpOverload) -> bool:
    """Return whether the operation is composed of others, which are intercepted on their own."""
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
    """Return which kernels compute attention in this process."""
    return tuple([read() for read, *_ in _ATTENTION])


def set_attention(settings: Mapping[int, Any]) -> None:
    """Set the entries of these indices."""
    for k, value in settings.items():
        _ATTENTION[k][1](value)


def route_attention(read: Callable[[int], Any], write: Callable[[int, Any], None]) -> None:
    """Call ``read`` or ``write``, with the index of the entry, instead of torch's own functions."""
    for k, (_, _, getter, setter) in enumerate(_ATTENTION):
        setattr(torch._C, getter, partial(read, k))
        setattr(torch._C, setter, partial(write, k))


def get_parametrize_cache() -> tuple[Any, Any]:
    """Return how many callers are inside ``parametrize.cached()``, and the tensors cached for them."""
    return parametrize._cache_enabled, parametrize._cache


def set_parametrized_cache(users: Any, cache: Any) -> None:
    parametrize._cache_enabled, parametrize._cache = users, cache


def replace_cached(function: Callable[[], Iterator[None]]) -> None:
    """Make ``parametrize.cached()`` enter ``function``, even where it was imported by name."""
    cached: Any = parametrize.cached
    cached.__closure__[cached.__code__.co_freevars.index("func")].cell_contents = function


# Transforms and tracers. Without these names: a pipe inside one would yield a wrong graph instead of an error.

_MODES: Final = torch._C._TorchDispatchModeKey
_has_mode = torch._C._get_dispatch_mode


def is_faked() -> bool:
    """Return whether this thread's operations are traced or faked, so that they draw no random numbers."""
    return any(_has_mode(mode) is not None for mode in (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL))


def transform() -> str | None:
    """Return the name of the transform or tracer that is active in this thread, or None."""
    level: Any = torch._C._functorch.peek_interpreter_stack()
    if level is not None:
        return f"torch.func.{level.key().name.lower()}"
    # Even without dual tensors in the input, because any tensor of a layer could be one.
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
    """Return whether a ``TorchDispatchMode`` is active in this thread. Without it: the mode would miss all stages."""
    return torch._C._len_torch_dispatch_stack() > 0


def dispatch_modes() -> list[Any]:
    """Return the active ``TorchDispatchMode`` objects of this thread, outermost first.

    Without it: they would miss all operations of a model's forward, which runs on a different thread.
    """
    return [torch._C._get_dispatch_stack_at(k) for k in range(torch._C._len_torch_dispatch_stack())]


@contextmanager
def with_dispatch_modes(modes: Iterable[Any]) -> Iterator[None]:
    """Activate the ``modes`` of another thread in this thread. The other thread must be waiting."""
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
    """Keep ``torch.compile`` from tracing ``function``. ``torch.compiler.disable`` would take seconds to import."""
    assert isinstance(function, FunctionType)
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return function


# Others.


def device_in(*args: Any, **kwargs: Any) -> torch.device | None:
    """Return the device in arguments of ``Module.to``, or None.

    Without it: ``pipe.to(device)`` would move all stages to one device.
    """
    device: torch.device | None = torch._C._nn._parse_to(*args, **kwargs)[0]
    return device


def stay_in_place(module: nn.Module) -> None:
    """Make ``module.to()`` do nothing, for a module of fake tensors.

    Torch would swap the tensors of such a module, which fails if they have weak references. Without it: parametrized
    layers would not support a dry run.
    """
    vars(module)["_apply"] = lambda *_: module


swap_implementations: Callable[[Tensor, Tensor], None] = torch._C._swap_tensor_impl
"""Swaps the contents of two tensors, but not their identities. ``torch.utils.swap_tensors`` rejects tensors with weak
references, such as the weights of an LSTM. Without it: parameters on ``meta`` would be replaced by new objects."""


def is_profiled() -> bool:
    """Return whether torch's profiler is active. Without it: every action of every run would be labeled."""
    return torch.autograd.profiler._is_profiler_enabled


set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled
"""Sets grad mode. Without it: a signal could interrupt ``torch.set_grad_enabled`` before it has an effect."""

# The torch function modes of a thread. Without these names: a mode that checks the operations between blocks would also
# slow down each operation inside them.

push_function_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
pop_function_mode: Callable[[], Any] = torch._C._pop_torch_function_stack


def function_modes() -> Iterator[Any]:
    """Return the modes of this thread, from the innermost to the outermost."""
    return map(torch._C._get_function_stack_at, reversed(range(torch._C._len_torch_function_stack())))


def set_function_modes(modes: Sequence[Any]) -> None:
    """Make ``modes`` the modes of this thread, from the innermost to the outermost."""
    while torch._C._len_torch_function_stack():
        pop_function_mode()
    for each in reversed(modes):
        push_function_mode(each)


def call_functions_by(call: Callable[[type, Callable[..., Any], tuple[Any, ...]], Any]) -> None:
    """Let ``call`` call each ``torch.autograd.Function``, which torch shows to no function mode.

    It receives the class, a function that calls it, and the arguments. Without it: a function between blocks would get
    tensors of earlier stages, parameters of other devices, and tensors of other processes, which have no values.
    """
    single: Any = torch.autograd.function._SingleLevelFunction

    def apply(kind: type, *args: Any) -> Any:
        return call(kind, super(single, kind).apply, args)

    single.apply = classmethod(apply)


def count_storage_uses(tensor: Tensor) -> int:
    """Return the number of references to the memory of ``tensor``: by itself, by views, and one by this call."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Returns the sequence number of the next autograd node in this thread; each thread counts its own nodes. Without it:
the stage that computed a tensor, which a block has stored in an attribute, could not be determined."""
