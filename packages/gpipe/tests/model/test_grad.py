"""Gradients computed inside a forward match the plain model, or raise."""

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import MODES, gradients, rows
from .residuals import Residuals, plain_of, residuals
from .test_forward import done


class Force(Residuals):
    """Returns the gradient of an energy: with respect to its input, or to a hidden state."""

    at: int

    def forward(self, x: Tensor) -> Tensor:
        found = [x, self.embed(x)]
        for layer in self.layers:
            found.append(found[-1] + layer(found[-1]).tanh())
        energy = self.head(sum(found, found[0])).square().sum() + self.head(found[-1] * 1).exp().sum()
        gradient: Tensor = torch.autograd.grad(energy, found[self.at], create_graph=True)[0]
        return gradient * 1


@pytest.mark.one_in(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["call", "whole", "1f1b"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("at", [0, 1, 3, -1])
def test_inner_gradient_matches_plain_model_or_raises(at: int, stages: int, how: str, mode: str) -> None:
    model = Force(*residuals().layers)
    model.at = at
    x = rows(6).requires_grad_()
    with closing(GPipe(model, devices=["cpu"] * stages, chunks=3, checkpoint=mode)) as pipe:
        plain = plain_of(pipe)
        if at != -1 and (stages > 1 or how != "1f1b"):
            with pytest.raises(RuntimeError, match=r"Force calls torch\.autograd\.grad"):
                done(pipe, x, how)
            return
        done(pipe, x, how)
    plain(x).square().sum().backward()
    torch.testing.assert_close(gradients(model), gradients(plain))


class Backward(Residuals):
    """Calls backward() before its blocks, between two of them, or after the last one."""

    at: int
    calls: Callable[[Tensor], None]

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for k, layer in enumerate(self.layers):
            self._call(k, x)
            x = x + layer(x).tanh()
        self._call(len(self.layers), x)
        return self.head(x)

    def _call(self, at: int, x: Tensor) -> None:
        if at == self.at:
            type(self).calls(x.square().sum())


@pytest.mark.parametrize("how", ["call", "whole", "1f1b"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("calls", [Tensor.backward, torch.autograd.backward])
def test_a_backward_between_blocks_is_refused(calls: Callable[[Tensor], None], at: int, stages: int, how: str) -> None:
    model = type("Backward", (Backward,), {"calls": staticmethod(calls)})(*residuals().layers)
    model.at = at
    with closing(GPipe(model, devices=["cpu"] * stages, chunks=3)) as pipe:
        with pytest.raises(RuntimeError, match=r"between its blocks the model calls backward\(\)"):
            done(pipe, rows(6), how)
        assert all(each.grad is None for each in model.parameters())


class Around(nn.Module):
    """Differentiates its blocks by ``torch.func``, with respect to a tensor that they get themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def energy(self, x: Tensor) -> Tensor:
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return (hidden * x).sum()

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(self.energy)(x).square().mean()


@pytest.mark.parametrize("reduction", [None, "mean"])
def test_a_transform_around_blocks_is_refused(reduction: str | None) -> None:
    pipe = GPipe(Around(), devices=["cpu"] * 3, chunks=3)
    with closing(pipe), pytest.raises(RuntimeError):
        pipe.step(torch.randn(6, 4), reduction=reduction)
