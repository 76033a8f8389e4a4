"""Operations that draw random numbers, handed to Python on the threads that want it, at no cost to all others.

A ``TorchDispatchMode`` takes every operation of a layer through Python, which made a step of a small GPT-2 take 1.25
times as long. Here only the operations that draw have a kernel in Python, at a dispatch key of torch that nothing else
uses: all others fall through it, and a thread for which the key is not set does not see it at all. The key comes before
autograd and modes; what a kernel does goes on to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.library import Library, fallthrough_kernel

from .._forks import fork_lock

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
"""Does an operation. It may call operations, which are not handed over again."""


class Interception:
    """Hands the operations that draw to ``handler``, on threads where it is :meth:`switched` on."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._lock = fork_lock()
        self._key: Any = None
        self._libraries: dict[str, Library] = {}  # by namespace; what they have registered ends with them
        self._operations: set[OpOverload] = set()

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """Inside, operations of this thread that draw are handed over, or are not."""
        before = on if self._key is None else torch._C._dispatch_tls_is_dispatch_key_included(self._key)
        if before == on:
            yield
            return
        torch._C._dispatch_tls_set_dispatch_key_included(self._key, on)
        try:
            yield
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(self._key, before)

    def ready(self) -> bool:
        """Begin, if that has not been done: it changes the tables of torch's dispatcher.

        Returns:
            False if that is not possible, because this torch has no such key, or somebody else uses it.
        """
        if self._key is None:
            with self._lock:
                if self._key is None and _free():
                    self._begin()
        return self._key is not None

    def _begin(self) -> None:
        self._libraries["_"] = Library("_", "IMPL")  # type: ignore[no-untyped-call]
        self._libraries["_"].fallback(fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]
        self._operations.update(filter(draws, _drawing("aten", "prims")))
        for operation in self._operations:
            self._register(operation)
        self._key = torch._C._dispatch_key_parse(_KEY)

    def add(self, operation: OpOverload) -> None:
        """Hand over one more operation that draws."""
        if operation not in self._operations:
            with self._lock:
                if operation not in self._operations:
                    self._operations.add(operation)
                    if self._key is not None:
                        self._register(operation)

    def _register(self, operation: OpOverload) -> None:
        if torch._C._dispatch_has_kernel_for_dispatch_key(operation._name, "CompositeImplicitAutograd"):
            return  # its steps are operations too, and it is among them that one draws
        namespace = operation.namespace
        if namespace not in self._libraries:
            self._libraries[namespace] = Library(namespace, "IMPL", _KEY)  # type: ignore[no-untyped-call]
        self._libraries[namespace].impl(operation, partial(self._hand_over, operation))  # type: ignore[no-untyped-call]

    def _hand_over(self, operation: OpOverload, *args: Any, **kwargs: Any) -> Any:
        torch._C._dispatch_tls_set_dispatch_key_included(self._key, False)
        try:
            return operation(*args, **kwargs) if _is_tracing() else self._handler(operation, args, kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(self._key, True)  # else it would not have come here


_KEY: Final = "DeferredInit"
"""Is there for extensions of torch: torchdistx, which has ended, made layers without memory by it."""


def _free() -> bool:
    try:
        used = torch._C._dispatch_has_backend_fallback(torch._C._dispatch_key_parse(_KEY))
        return not used and not torch._C._dispatch_get_registrations_for_dispatch_key(_KEY)
    except (AttributeError, RuntimeError):
        return False


def _drawing(*namespaces: str) -> Iterator[OpOverload]:
    """Operations of torch that draw. It has thousands, so that those that do not are passed over without an object."""
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.partition(".")
        namespace, _, own = packet.partition("::")
        if namespace in namespaces and _DRAWS in torch._C._get_operation_overload(packet, overload)[2]:
            yield getattr(getattr(getattr(torch.ops, namespace), own), overload or "default")


_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def _is_tracing() -> bool:
    """Whether this is no computation, but the compilation of one."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACING))


@cache
def draws(operation: OpOverload) -> bool:
    """Whether an operation draws random numbers."""
    return _DRAWS in operation.tags and operation not in _DRAWS_NOTHING


_DRAWS: Final = torch.Tag.nondeterministic_seeded
_DRAWS_NOTHING = frozenset([torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default])
"""Operations that are marked as drawing, and do not: this one is not taken where attention drops anything."""
