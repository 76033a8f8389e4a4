"""Custom functions between blocks get tensors of their own stage, as operations do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gpipe import GPipe

from ..layers import gradients

WIDTH = 4


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum_to_size(weight.shape)


class WithSetup(Function):
    """The newer kind, which transforms support."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = Product.backward


bound = Product.apply  # before any pipe was made


class Model(nn.Module):
    """A function gets a tensor of the first stage, and a parameter of it, after the last block."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = x = self.begin(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(self.end(x + self.function(first, self.begin.weight[0]))[:, 0], y)


class OfParameter(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(self.end(self.function(x, self.begin.bias))[:, 0], y)


@contextmanager
def other_mode() -> Iterator[None]:
    class Other(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with Other():
        yield


def under_another_mode(x: Tensor, weight: Tensor) -> Tensor:
    with other_mode():
        return bound(x, weight)


def under_device(x: Tensor, weight: Tensor) -> Tensor:
    with torch.device("cpu"):
        return bound(x, weight)


FUNCTIONS = [Product.apply, bound, WithSetup.apply, under_another_mode, under_device]


@pytest.mark.parametrize(("checkpoint", "reduction"), [("never", None), ("always", "mean")])
@pytest.mark.parametrize("kind", [Model, OfParameter])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_function_gets_tensors_of_its_own_stage(
    function: Any, kind: type[Model], checkpoint: str, reduction: str | None
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, WIDTH), torch.randn(6)
    plain = kind(function)
    pipe = GPipe(deepcopy(plain), devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
    plain(x, y).backward()
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(x, y=y, reduction=reduction)
        torch.testing.assert_close(gradients(pipe), gradients(plain))
    pipe.zero_grad()
    pipe(x, y).backward()
    torch.testing.assert_close(gradients(pipe), gradients(plain))
    pipe.close()


def hidden(x: Tensor, weight: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x * weight


def test_what_torch_hides_from_function_modes_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"pass it tensor\.clone"):
        GPipe(Model(hidden), devices=["cpu"] * 3, chunks=3).step(
            torch.randn(6, WIDTH), y=torch.randn(6), reduction="mean"
        )


def test_functions_elsewhere_get_their_arguments_as_they_are() -> None:
    x, weight = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    seen: list[Any] = []

    class Look(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            seen.extend(args)
            return torch.zeros(())

    Look.apply(x, weight, "text", None)
    assert seen[0] is x
    assert seen[1] is weight
    assert seen[2:] == ["text", None]
