"""Code compiled around blocks stops at them, and trains like the model."""

import copy
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import gradients, rows
from .residuals import Residuals, residuals
from .test_forward import done

eager = torch.compile(backend="eager")


class Method(Residuals):
    @eager
    def body(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = x + layer(x).tanh() * first
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x)))


class Around(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.head = model, nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x)) + x


def in_place() -> nn.Module:
    model = residuals()
    model.compile(backend="eager")  # type: ignore[no-untyped-call]
    return model


MODELS = {
    "a method": lambda: Method(*residuals().layers),
    "a module": lambda: Around(torch.compile(residuals(), backend="eager")),
    "the model": in_place,
}


@pytest.mark.filterwarnings("ignore")  # compiler warnings
@pytest.mark.parametrize("how", ["call", "1f1b"])
@pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)
def test_code_compiled_around_blocks_trains_correctly(made: Callable[[], nn.Module], how: str) -> None:
    model, x = made(), rows(6)
    plain = copy.deepcopy(model)
    with closing(GPipe(model, devices=["cpu"] * 3, chunks=3)) as pipe:
        for _ in range(2):
            model.zero_grad()
            done(pipe, x, how)
    plain(x).square().sum().backward()
    torch.testing.assert_close(gradients(model), gradients(plain))
