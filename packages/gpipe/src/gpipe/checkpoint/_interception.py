"""Intercept the operations that draw random numbers, on some threads, at no cost for other operations and threads.

A ``TorchDispatchMode`` would pass every operation of a layer through Python; a step of a small GPT-2 then took 1.25
times as long. Here only the operations that draw have a kernel in Python, at a dispatch key of torch that nothing else
uses. Other operations skip the key, and threads for which it is not set do not use it at all. The key comes before
autograd and modes; operations inside a kernel pass through these.
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
"""A function that does an operation. Operations that it calls are not intercepted."""


class Interception:
    """Passes the operations that draw to ``handler``, on threads where it is :meth:`switched` on."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._lock = fork_lock()
        self._key: Any = None
        self._libraries: dict[str, Library] = {}  # by namespace; what they have registered ends with them
        self._operations: set[OpOverload] = set()

    @contextmanager
    def switched(self, on: bool) -> Iterator[None]:
        """A context in which operations of this thread that draw are intercepted, or are not."""
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
        """Register the kernels, if that has not been done. This changes the tables of torch's dispatcher.

        Returns:
            False if that is impossible: this torch has no such key, or other code uses it.
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
        """Intercept one more operation that draws."""
        if operation not in self._operations:
            with self._lock:
                if operation not in self._operations:
                    self._operations.add(operation)
                    if self._key is not None:
                        self._register(operation)

    def _register(self, operation: OpOverload) -> None:
        if torch._C._dispatch_has_kernel_for_dispatch_key(operation._name, "CompositeImplicitAutograd"):
            return  # it is composed of other operations, and one of these draws
        namespace = operation.namespace
        if namespace not in self._libraries:
            self._libraries[namespace] = Library(namespace, "IMPL", _KEY)  # type: ignore[no-untyped-call]
        self._libraries[namespace].impl(operation, partial(self._hand_over, operation))  # type: ignore[no-untyped-call]

    def _hand_over(self, operation: OpOverload, *args: Any, **kwargs: Any) -> Any:
        torch._C._dispatch_tls_set_dispatch_key_included(self._key, False)
        try:
            return operation(*args, **kwargs) if _is_tracing() else self._handler(operation, args, kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(self._key, True)  # as it was before this call


_KEY: Final = "DeferredInit"
"""A key for extensions of torch. torchdistx, which is no longer developed, made layers without memory by it."""


def _free() -> bool:
    try:
        used = torch._C._dispatch_has_backend_fallback(torch._C._dispatch_key_parse(_KEY))
        return not used and not torch._C._dispatch_get_registrations_for_dispatch_key(_KEY)
    except (AttributeError, RuntimeError):
        return False


def _drawing(*namespaces: str) -> Iterator[OpOverload]:
    """The operations of torch that draw. There are thousands; those that do not draw are skipped by name."""
    for name in torch._C._dispatch_get_all_op_names():
        packet, _, overload = name.partition(".")
        namespace, _, own = packet.partition("::")
        if namespace in namespaces and _DRAWS in torch._C._get_operation_overload(packet, overload)[2]:
            yield getattr(getattr(getattr(torch.ops, namespace), own), overload or "default")


_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def _is_tracing() -> bool:
    """Whether torch is compiling instead of computing."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACING))


@cache
def draws(operation: OpOverload) -> bool:
    """Whether an operation draws random numbers."""
    return _DRAWS in operation.tags and operation not in _DRAWS_NOTHING


_DRAWS: Final = torch.Tag.nondeterministic_seeded
_DRAWS_NOTHING = frozenset([torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default])
"""Operations that are tagged as drawing and do not: this one is not used if attention has dropout."""
