"""Intercept random operations on selected threads, and pass them a generator.

A ``TorchDispatchMode`` passes every operation through Python, and a step of a small GPT-2 then takes 1.25 times as
long. Here, only random operations have a Python kernel, at a dispatch key that torch does not use otherwise. The rest
skips the key, and threads that do not set it never use it. The key precedes autograd and modes, and operations inside a
kernel still pass through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from .. import _torch
from .._forks import fork_lock
from .._torch import INTERCEPTING, OpOverload

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]
"""A function that executes an operation. Operations that it calls are not intercepted."""


class Interception:
    """Passes random operations to ``handler``, on threads with ``set_intercepting(True)``."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._lock = fork_lock()
        self._libraries: dict[str, Library] = {}  # by namespace; they own the registered kernels
        self._known: set[str] = set()

    def prepare(self) -> None:
        """Find the random operations, including operations of other libraries, and register kernels for them.

        Operations registered later are not intercepted. RuntimeError if other code uses the dispatch key.
        """
        with self._lock:
            if not self._libraries:
                self._begin()
            names = {*_torch.operation_names()} - self._known
            for operation in _drawing(names):
                self._register(operation)
            self._known |= names

    def _begin(self) -> None:
        if _torch.is_intercepted_by_others():
            raise RuntimeError(
                f"another library has kernels for torch's dispatch key {INTERCEPTING}, which a pipe needs to give each "
                "layer random numbers of its own; do not import that library (torchdistx?) in this process"
            )
        self._libraries["_"] = Library("_", "IMPL")  # type: ignore[no-untyped-call]
        self._libraries["_"].fallback(fallthrough_kernel, INTERCEPTING)  # type: ignore[no-untyped-call]

    def _register(self, operation: OpOverload) -> None:
        if _torch.is_composite(operation):
            return  # one of its component operations is random and is intercepted
        namespace = operation.namespace
        if namespace not in self._libraries:
            self._libraries[namespace] = Library(namespace, "IMPL", INTERCEPTING)  # type: ignore[no-untyped-call]
        self._libraries[namespace].impl(operation, partial(self._hand_over, operation))  # type: ignore[no-untyped-call]

    def _hand_over(self, operation: OpOverload, *args: Any, **kwargs: Any) -> Any:
        # The operation then reaches its real kernel, and operations of the handler are not intercepted.
        _torch.set_intercepting(False)
        try:
            return operation(*args, **kwargs) if _torch.is_faked() else self._handler(operation, args, kwargs)
        finally:
            _torch.set_intercepting(True)  # as it was before this call


def _drawing(names: Iterable[str]) -> Iterator[OpOverload]:
    """Yield the random operations among ``names``."""
    for name in names:
        if _torch.has_tag(name, _DRAWS):
            packet, _, overload = name.partition(".")
            namespace, _, own = packet.partition("::")
            # Looked up only here, because torch creates an object for each operation on first access.
            operation = getattr(getattr(getattr(torch.ops, namespace), own), overload or "default")
            if operation not in _DRAWS_NOTHING:
                yield operation


_DRAWS: Final = torch.Tag.nondeterministic_seeded
_DRAWS_NOTHING = frozenset([torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default])
"""Operations that are tagged as random but are not. This one is not used if attention has dropout."""

_CPU: Final = torch.device("cpu")


def drops_nothing(operation: OpOverload, args: tuple[Any, ...]) -> bool:
    return operation is torch.ops.aten.native_dropout.default and (args[2] is False or not args[0].numel())


def _native_dropout(
    input: Tensor,  # noqa: A002
    p: float,
    train: bool | None,
    *,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Compute ``torch.native_dropout`` in training mode by its component operations on a CPU."""
    # The operation takes no generator. Scaling the mask instead of the product gives the same values as torch.
    keep = 1.0 - p
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(keep, generator=generator)
    return input.mul(mask.to(input.dtype).mul_(1.0 / keep if keep else 0.0)), mask


@cache
def with_generator(operation: OpOverload) -> Callable[..., Any] | None:
    """Return ``operation``, or its overload, that takes the same arguments and a generator."""
    if operation is torch.ops.aten.native_dropout.default:
        return _native_dropout
    if _takes_generator(operation):
        return operation
    # Often a different overload with the same name takes the generator.
    wanted = _arguments(operation) | {"generator"}
    packet = operation.overloadpacket
    overloads: list[OpOverload] = [getattr(packet, name) for name in packet.overloads()]
    return next((o for o in overloads if _takes_generator(o) and _arguments(o) == wanted), None)


def _arguments(operation: OpOverload) -> frozenset[object]:
    arguments = operation._schema.arguments
    return frozenset("generator" if a.name == "generator" else (a.name, str(a.type)) for a in arguments)


def _takes_generator(operation: OpOverload) -> bool:
    return "generator" in _arguments(operation)


def find_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    # The common case, without a loop: a tensor that is filled, or determines shape and device.
    if args and isinstance(args[0], Tensor) and "device" not in kwargs:
        return _CPU if args[0].is_cpu else args[0].device
    tensors = (value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    device = kwargs.get("device") or next(tensors, "cpu")
    return torch.device(device)
