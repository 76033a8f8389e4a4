"""Layers whose weights are tensor subclasses, as in quantization libraries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

aten = torch.ops.aten


class Packed(Tensor):
    """Bytes and a scale, with the shape and type of the weight. It can be neither cloned nor faked."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Packed:
        return Packed(parts["codes"], parts["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            weight = args[1]
            assert type(weight.codes) is Tensor  # with values
            return F.linear(args[0], weight.codes * weight.scale, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        if func is aten.clone.default:
            return args[0].codes * args[0].scale  # so that deepcopy raises
        raise NotImplementedError(f"no {func} of packed weights")


class Coded(nn.Parameter):
    """Bytes of a different shape than the weight, with an object that holds two scales per byte."""

    def __new__(cls, codes: Tensor, requires_grad: bool = False) -> Coded:
        made = Tensor._make_subclass(cls, codes, requires_grad)
        made.state = SimpleNamespace(scales=torch.full((2 * codes.numel(),), 0.01))
        return made

    def __deepcopy__(self, memo: Any) -> Coded:
        return Coded(self.detach().clone())


class PackedLinear(nn.Linear):
    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        codes = torch.randint(-9, 9, (width, width), dtype=torch.int8)
        self.weight = nn.Parameter(Packed(codes, torch.tensor(0.01)), requires_grad=False)


class CodedLinear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = Coded(torch.randint(-9, 9, (width * width, 1), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        scales = self.weight.state.scales.view(2, self.width, self.width)
        return x @ (self.weight.view(self.width, self.width) * scales[0])


class Adapted(nn.Module):
    """A layer of packed, frozen weights with a low-rank adapter."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(width, 2), nn.Linear(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x).tanh() + self.up(self.down(x))


KINDS = {"wrapped": (PackedLinear, 1), "parameter": (CodedLinear, 9)}
"""Classes of layers, and the bytes that they hold for each weight."""
