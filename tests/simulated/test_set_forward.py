"""A forward that is set on a pipe computes on the last device, where the model's outputs are."""

import copy
import weakref
from collections.abc import Callable
from contextlib import closing
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from gpipe import GPipe

from .accelerator import device


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return hidden


class Model(nn.Module):
    """The head's weight is the embedding's, on the first device, or a separate one on the last."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(), nn.Linear(4, 9, bias=False)
        if tied:
            self.head.weight = self.trunk.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(tokens))

    method: Any = None

    def loss(self, tokens: Tensor) -> Tensor:
        return _module(self, tokens)


class Product(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ hidden.flatten(0, 1)


def _function(self: Any, tokens: Tensor) -> Tensor:
    return _loss(Product.apply(self.trunk(tokens), self.head.weight), tokens)


def _operation(self: Any, tokens: Tensor) -> Tensor:
    return _loss(F.linear(self.trunk(tokens), self.head.weight), tokens)


def _module(self: Any, tokens: Tensor) -> Tensor:
    return _loss(self.head(self.trunk(tokens)), tokens)


def _to_weight(self: Any, tokens: Tensor) -> Tensor:
    """Use the head's weight like TRL."""
    hidden = self.trunk(tokens).to(self.head.weight.device)
    return _loss(hidden @ self.head.weight.t(), tokens.to(hidden.device))


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    labels = tokens[:, 1:].clone()
    labels[:, 0] = -100
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("forward", [_function, _operation, _module, _to_weight, None])
@pytest.mark.parametrize("options", [{}, {"offload": True}, {"checkpoint": "always"}], ids=["", "offload", "always"])
def test_it_trains_as_the_plain_model(forward: Callable[..., Tensor] | None, tied: bool, options: Any) -> None:
    """A method of the model does as well."""
    torch.manual_seed(0)
    plain, tokens = Model(tied=tied), torch.randint(9, (6, 5))
    pipe = GPipe(copy.deepcopy(plain), devices=[device(0), device(1)], chunks=3, **options)
    compute = [plain.loss, pipe.loss]
    if forward is not None:
        pipe.forward = MethodType(forward, weakref.proxy(pipe))
        compute = [lambda tokens: forward(plain, tokens), pipe]
    with closing(pipe):
        for _ in range(2):
            expected, loss = compute[0](tokens), compute[1](tokens.to(device(0)))
            torch.testing.assert_close(loss.detach().to("cpu"), expected.detach())
            expected.backward()
            loss.backward()
        for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.to("cpu"), other.grad)


def _clamps(model: Any, _: Tensor) -> None:
    with torch.no_grad():
        model.trunk.embed.weight.clamp_(max=0.1)
        model.trunk.layers[0].weight.data.mul_(0.5)


def _trains(model: Any, tokens: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        _module(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _divides_by_norm(model: Any, tokens: Tensor) -> None:
    hidden = model.trunk(tokens)
    with torch.no_grad():
        norm = (model.head.weight * hidden.detach()[0, 0]).norm()
    (F.linear(hidden, model.head.weight) / norm).square().sum().backward()


@pytest.mark.parametrize("offload", [False, True, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", [_clamps, _trains, _divides_by_norm])
def test_method_has_same_effects_as_in_plain_model(method: Callable[..., None], offload: Any) -> None:
    """It may change parameters, train them, or read them without gradients."""
    Model.method = method
    torch.manual_seed(0)
    plain, tokens = Model(tied=True), torch.randint(9, (6, 5))
    with closing(GPipe(copy.deepcopy(plain), devices=[device(0), device(1)], chunks=3, offload=offload)) as pipe:
        pipe.method(tokens.to(device(0)))
        plain.method(tokens)
        bound = {"rtol": 0.1, "atol": 0.05} if offload is torch.bfloat16 else {}
        for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.detach().to("cpu"), other.detach(), **bound)
            assert (own.grad is None) == (other.grad is None)
            assert own.grad is None or own.grad.to("cpu").isclose(other.grad, rtol=0.1, atol=0.1).float().mean() > 0.9


@pytest.mark.parametrize("offload", [True, torch.bfloat16], ids=str)
def test_a_method_reads_parameters_as_they_are(offload: Any) -> None:
    Model.method = lambda self: self.state_dict()
    with closing(GPipe(Model(tied=False), devices=[device(0), device(1)], chunks=3, offload=offload)) as pipe:
        for name, tensor in pipe.method().items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, pipe.state_dict()[name])


def _recomputes(model: Any, tokens: Tensor) -> Tensor:
    hidden = model.trunk(tokens)
    return checkpoint(lambda hidden: hidden @ model.trunk.embed.weight.t(), hidden, use_reentrant=False).sum()


def _adds_to_parameter(model: Any, tokens: Tensor) -> Tensor:
    hidden = model.trunk(tokens)
    with torch.no_grad():
        model.trunk.embed.weight.add_(hidden.detach().sum((0, 1)))
    return hidden.sum()


@pytest.mark.parametrize(
    ("method", "error"), [(_recomputes, "whose recomputation would not move them"), (_adds_to_parameter, "be lost")]
)
def test_a_method_that_would_be_wrong_raises(method: Callable[..., Tensor], error: str) -> None:
    Model.method = method
    pipe = GPipe(Model(tied=True), devices=[device(0), device(1)], chunks=3)
    with closing(pipe), pytest.raises(RuntimeError, match=error):
        pipe.method(torch.zeros(6, 5, dtype=torch.long, device=device(0)))
