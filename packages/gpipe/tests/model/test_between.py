"""Custom functions between blocks get tensors of their stage, like operations."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from gpipe import GPipe
from gpipe.distributed import Rank

from ..distributed.planted import expect_gradients
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


class Doubled(Function):
    """Modifies its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Several(Function):
    """Returns several tensors, None, and a number; one tensor has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, width: int) -> tuple[Any, ...]:
        large = x > 0
        ctx.mark_non_differentiable(large)
        ctx.save_for_backward(large)
        return x * width, large, None, width

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Any, ...]:
        return gradient * WIDTH, None


def _view(x: Tensor, mask: Tensor) -> Tensor:
    x = x * 1
    Doubled.apply(x[:, :2])
    return x


def _output(x: Tensor, mask: Tensor) -> Tensor:
    return Doubled.apply(x)


def _common(x: Tensor, mask: Tensor) -> Tensor:
    return x * Doubled.apply(mask)


def _several(x: Tensor, mask: Tensor) -> Tensor:
    scaled, large, _, width = Several.apply(x, WIDTH)
    return torch.where(large, scaled, x * width)


class Masked(nn.Module):
    """A function of two tensors: a block's output, or a tensor computed only from inputs and used later."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.function = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)), function

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).float()
        x = self.function(self.layers[0](x), mask)
        for layer in self.layers[1:]:
            x = layer(x).tanh() * (mask + 1)
        return x


def _squares(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("function", [_view, _output, _common, _several])
def test_a_function_may_modify_tensors_and_return_several(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    plain, x = Masked(function), torch.randn(6, WIDTH)
    pipe = GPipe(deepcopy(plain), devices=["cpu"] * 2, chunks=3)
    _squares(plain(x)).backward()
    pipe.step(x, loss_fn=_squares, reduction="mean")
    torch.testing.assert_close(gradients(pipe), gradients(plain))
    pipe.zero_grad()
    _squares(pipe(x)).backward()
    torch.testing.assert_close(gradients(pipe), gradients(plain))
    pipe.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("function", [_view, _output, _common, _several])
def test_so_it_may_on_ranks(worlds: Any, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    worlds(2).run(_expect_on_ranks, function)


def _expect_on_ranks(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    plain, x = Masked(function), torch.randn(6, WIDTH)
    with closing(Rank(deepcopy(plain), chunks=3)) as rank:
        _squares(plain(x)).backward()
        rank.step(x, loss_fn=_squares, reduction="mean")
        expect_gradients(rank, plain)
