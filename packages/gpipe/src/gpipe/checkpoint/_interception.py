"""Intercept the operations that draw random numbers, on some threads, at no cost for other operations and threads.

A ``TorchDispatchMode`` would pass every operation of a layer through Python; a step of a small GPT-2 then took 1.25
times as long. Here only the operations that draw have a kernel in Python, at a dispatch key of torch that nothing else
uses. Other operations skip the key, and threads for which it is not set do not use it at all. The key comes before
autograd and modes; operations inside a kernel pass through these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch._ops import OpOverload
from torch.library import Library, fallthrough_kernel

from .._forks import fork_lock

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
"""A function that does an operation. Operations that it calls are not intercepted."""


class Interception:
    """Passes the operations that draw to ``handler``, on threads where it is switched :meth:`on`."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._lock = fork_lock()
        self._key: Any = None
        self._libraries: dict[str, Library] = {}  # by namespace; what they have registered ends with them
        self._known: set[str] = set()

    @contextmanager
    def on(self) -> Iterator[None]:
        """A context in which operations of this thread that draw are intercepted."""
        before = torch._C._dispatch_tls_is_dispatch_key_included(self._key)
        torch._C._dispatch_tls_set_dispatch_key_included(self._key, True)
        try:
            yield
        finally:
            torch._C._dispatch_tls_set_dispatch_key_included(self._key, before)

    def prepare(self) -> None:
        """Find the operations that draw, also those of other libraries, and register kernels for them.

        This changes the tables of torch's dispatcher. Operations that are registered later are not intercepted.

        Raises:
            RuntimeError: other code uses the dispatch key.
        """
        with self._lock:
            if self._key is None:
                self._begin()
            names = {*torch._C._dispatch_get_all_op_names()} - self._known
            for operation in _drawing(names):
                self._register(operation)
            self._known |= names

    def _begin(self) -> None:
        key = torch._C._dispatch_key_parse(_KEY)
        if torch._C._dispatch_has_backend_fallback(key) or torch._C._dispatch_get_registrations_for_dispatch_key(_KEY):
            raise RuntimeError(
                f"another library has kernels for torch's dispatch key {_KEY}, which a pipe needs to give each layer "
                "random numbers of its own; do not import that library (torchdistx?) in this process"
            )
        self._libraries["_"] = Library("_", "IMPL")  # type: ignore[no-untyped-call]
        self._libraries["_"].fallback(fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]
        self._key = key

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


def _drawing(names: Iterable[str]) -> Iterator[OpOverload]:
    """The operations among ``names`` that draw. There are thousands; those that do not draw are skipped by name."""
    for name in names:
        packet, _, overload = name.partition(".")
        if _DRAWS in torch._C._get_operation_overload(packet, overload)[2]:
            namespace, _, own = packet.partition("::")
            operation = getattr(getattr(getattr(torch.ops, namespace), own), overload or "default")
            if operation not in _DRAWS_NOTHING:
                yield operation


_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def _is_tracing() -> bool:
    """Whether torch is compiling instead of computing."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(map(torch._C._get_dispatch_mode, _TRACING))


_DRAWS: Final = torch.Tag.nondeterministic_seeded
_DRAWS_NOTHING = frozenset([torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default])
"""Operations that are tagged as drawing and do not: this one is not used if attention has dropout."""
