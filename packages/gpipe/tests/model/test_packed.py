"""Frozen weights of a tensor subclass with few operations, as in quantization libraries, with trained adapters."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import MODES

aten = torch.ops.aten
ALLOWED = {aten.detach.default, aten.t.default, aten.mm.default, aten.addmm.default, aten.clone.default}


class Packed(Tensor):
    """Integers and a scale. It does not support addition, comparison, conversion or reductions."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, turned: bool = False) -> Packed:
        size = codes.t().shape if turned else codes.shape
        return Tensor._make_wrapper_subclass(cls, size, dtype=scale.dtype, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor, turned: bool = False) -> None:
        self.codes, self.scale, self.turned = codes, scale, turned

    @classmethod
    def of(cls, weight: Tensor) -> Packed:
        scale = weight.detach().abs().max() / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def unpacked(self) -> Tensor:
        found = self.codes.to(self.scale.dtype) * self.scale
        return found.t() if self.turned else found

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in ALLOWED:
            raise NotImplementedError(f"Packed does not implement {function}")
        if function in (aten.detach.default, aten.clone.default):
            return cls(args[0].codes, args[0].scale, args[0].turned)
        if function is aten.t.default:
            return cls(args[0].codes, args[0].scale, not args[0].turned)
        return function(*(each.unpacked() if isinstance(each, Packed) else each for each in args))


class Adapted(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, out, bias=False)
        self.base.weight = nn.Parameter(Packed.of(self.base.weight), requires_grad=False)
        self.down, self.up = nn.Linear(width, 2), nn.Linear(2, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Model(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Adapted(width, width) for _ in range(4))
        self.head = nn.Linear(width, 3, bias=False)
        self.head.weight = nn.Parameter(Packed.of(self.head.weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def norm(output: Tensor) -> Tensor:
    return output.square().sum().sqrt()


@pytest.mark.parametrize("how", ["whole", "1f1b", "zero_bubble", "call"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_adapters_train_as_in_the_plain_model(checkpoint: str, how: str) -> None:
    x, plain, model = torch.randn(6, 6, generator=torch.Generator().manual_seed(1)), Model(), Model()
    with closing(GPipe(model, devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)) as pipe:
        for _ in range(2):
            if how == "call":
                norm(pipe(x)).backward()
            elif how == "whole":
                pipe.step(x, loss_fn=norm)
            else:
                pipe.step(x, loss_fn=lambda output: output.square().sum(), reduction="sum", schedule=how)
            (norm(plain(x)) if how in ("call", "whole") else plain(x).square().sum()).backward()
        pipe.evaluate(x, loss_fn=norm)
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name].grad)
