"""Operations that draw random numbers: where they draw, and how they are given a generator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from .._torch import OpOverload

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
    """``torch.native_dropout`` in training mode, by the operations that it consists of on a CPU."""
    # The operation takes no generator. The same values as torch: the mask is scaled, not the product.
    keep = 1.0 - p
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(keep, generator=generator)
    return input.mul(mask.to(input.dtype).mul_(1.0 / keep if keep else 0.0)), mask


@cache
def with_generator(operation: OpOverload) -> Callable[..., Any] | None:
    """``operation``, or its overload, that takes the same arguments and a generator."""
    if operation is torch.ops.aten.native_dropout.default:
        return _native_dropout
    if _takes_generator(operation):
        return operation
    # A generator is often an argument of another overload with the same name.
    wanted = _arguments(operation) | {"generator"}
    packet = operation.overloadpacket
    overloads: list[OpOverload] = [getattr(packet, name) for name in packet.overloads()]
    return next((o for o in overloads if _takes_generator(o) and _arguments(o) == wanted), None)


def _arguments(operation: OpOverload) -> frozenset[object]:
    arguments = operation._schema.arguments
    return frozenset("generator" if a.name == "generator" else (a.name, str(a.type)) for a in arguments)


def _takes_generator(operation: OpOverload) -> bool:
    return "generator" in _arguments(operation)


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    # The usual case, without a loop: the tensor that is filled, or whose shape and device are taken.
    if args and isinstance(args[0], Tensor) and "device" not in kwargs:
        return _CPU if args[0].is_cpu else args[0].device
    tensors = (value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    device = kwargs.get("device") or next(tensors, "cpu")
    return torch.device(device)
