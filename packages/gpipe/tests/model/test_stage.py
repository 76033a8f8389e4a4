"""Changes between a checkpointed forward and its backward are allowed if no recomputation uses the values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import Layer

WIDTH = 4


def double(x: Tensor, *, by: float) -> Tensor:
    return x * by


def block() -> Layer:
    layer = Layer(lambda s, x: s.scale(s.linear(x)).tanh(), linear=nn.Linear(WIDTH, WIDTH))
    layer.scale, layer.active = partial(double, by=2.0), ["default"]
    return layer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for each in self.blocks:
            hidden = each(hidden)
        return hidden


def same_settings(model: Any) -> None:
    model.blocks[0].scale, model.blocks[0].active = partial(double, by=2.0), ["default"]


def other_function(model: Any) -> None:
    model.blocks[0].scale = partial(double, by=3.0)


def other_names(model: Any) -> None:
    model.blocks[0].active = ["other"]


def hook_outside(model: Any) -> None:
    model.embed.register_forward_hook(lambda *_: None)
    model.embed.eval()


def hook_on_block(model: Any) -> None:
    model.blocks[0].linear.register_forward_hook(lambda *_: None)


def gradients(change: Callable[[Any], None]) -> list[Tensor | None]:
    torch.manual_seed(0)
    model = Model()
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2, checkpoint="always")) as pipe:
        output = pipe(torch.ones(4, WIDTH))
        change(model)
        output.sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("change", [same_settings, hook_outside])
def test_change_that_no_recomputation_sees(change: Callable[[Any], None]) -> None:
    torch.testing.assert_close(gradients(change), gradients(lambda model: None))


@pytest.mark.parametrize(
    ("change", "name"),
    [(other_function, "blocks.0.scale|scale"), (other_names, "active"), (hook_on_block, "hooks of 'blocks.0.linear'")],
)
def test_change_that_a_recomputation_would_see_raises(change: Callable[[Any], None], name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"({name}).*between the forward and the backward"):
        gradients(change)
