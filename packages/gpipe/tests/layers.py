"""Small layers, models and measures that several tests use."""

import copy
import operator
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from packages.profiler.tests.strategies import Call as Call
from packages.profiler.tests.strategies import OnGradient as OnGradient
from torch import Tensor, nn

import gpipe
from gpipe import GPipe, LossSum
from gpipe.skip import pop, skippable, stash

DOUBLE = torch.float64
MODES = ("never", "except_last", "always", "offload")
each_mode = pytest.mark.parametrize("mode", MODES)
each_way = pytest.mark.parametrize("way", [nullcontext, gpipe.inline], ids=["threads", "inline"])
INDUCTOR = pytest.param(
    "inductor",
    marks=[pytest.mark.long, pytest.mark.skipif(shutil.which("gcc") is None, reason="inductor needs a C++ compiler")],
)


class Layer(nn.Module):
    """A layer that is a function of itself and its input, with modules that it may use."""

    def __init__(self, function: Callable[..., Any], *modules: nn.Module, **attributes: Any) -> None:
        super().__init__()
        self.function, self.m = function, nn.ModuleList(modules)
        for name, value in attributes.items():
            is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            self.register_buffer(name, value) if is_buffer else setattr(self, name, value)

    def forward(self, *values: Any) -> Any:
        return self.function(self, *values)


def double(x: Tensor) -> Tensor:
    return x * 2


def triple(x: Tensor) -> Tensor:
    return x * 3


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Stashes what one function gives, and returns what another one does."""

    def __init__(self, skip: Callable[[Any], Any] = double, onward: Callable[[Any], Any] = triple) -> None:
        super().__init__()
        self.skip, self.onward = skip, onward

    def forward(self, value: Any) -> Any:
        yield stash("skip", self.skip(value))
        return self.onward(value)


@skippable(pop=["skip"])
class Pop(nn.Module):
    """Combine its input and the skip with a function, by default addition."""

    def __init__(self, join: Callable[[Any, Any], Any] = operator.add) -> None:
        super().__init__()
        self.join = join

    def forward(self, value: Any) -> Any:
        skip = yield pop("skip")
        return self.join(value, skip)


class Tied(nn.Module):
    """A linear layer with the weight of another one."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def on_backward(x: Tensor, function: Callable[[], object]) -> Tensor:
    """The identity, whose backward calls a function."""
    found: Tensor = OnGradient.apply(x, lambda gradient: (function(), gradient)[1])
    return found


def blocks(x: Tensor) -> Tensor:
    """Return the identity, but stop the gradient."""
    found: Tensor = OnGradient.apply(x, lambda gradient: None)
    return found


class Overwrites(torch.autograd.Function):
    """The identity times two, which computes its gradient in the memory of the one that arrives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else gradient.mul_(2)


class AddsLoss(torch.autograd.Function):
    """The identity, whose backward also trains an additional loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), dtype=gradient.dtype)


class Row(nn.Module):
    """A model with a custom forward, which calls its blocks in order."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def linear() -> nn.Linear:
    return nn.Linear(3, 3, dtype=DOUBLE)


def linears(layers: int = 3, width: int = 3) -> nn.Sequential:
    """Linear layers in double precision, the same in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width, dtype=DOUBLE) for _ in range(layers)))


def rows(count: int = 6, width: int = 3, **options: Any) -> Tensor:
    """Return the same input in every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, width, dtype=DOUBLE, generator=generator).requires_grad_(options.pop("grad", False))


def numbered(count: int) -> Tensor:
    """Return one row per micro-batch, containing its index."""
    return torch.arange(float(count), dtype=DOUBLE)[:, None]


def piped(model: nn.Sequential, balance: list[int], **options: Any) -> GPipe:
    """A pipe of a copy of ``model``, all on the CPU."""
    return GPipe(copy.deepcopy(model), balance, devices=["cpu"] * len(balance), **options)


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same(left: nn.Module, right: nn.Module) -> None:
    """Check that the gradients of all parameters are equal."""
    tolerance = 1e-10 if next(left.parameters()).dtype is DOUBLE else 1e-4
    torch.testing.assert_close(gradients(left), gradients(right), rtol=tolerance, atol=tolerance)


def assert_trains_like(pipe: GPipe, model: nn.Module, x: Tensor | None = None) -> None:
    """``pipe`` computes what ``model`` does, forwards and backwards, whatever happened to it before."""
    x = rows() if x is None else x
    pipe.zero_grad()
    model.zero_grad()
    x, y = (x.detach().clone().requires_grad_(x.requires_grad) for _ in "xy")
    output, expected = pipe(x), model(y)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert_same(pipe, model)


def squares(output: Tensor, target: Any = None) -> Tensor:
    return output.square().sum()


def counted(output: Tensor, target: Any = None) -> LossSum:
    return LossSum(output.square().sum(), output.numel())


ALL_ROWS = "all rows"
"""A step whose loss is computed once, on the full batch; used like the name of a schedule."""


def trained(
    module: nn.Module, x: Any, schedule: str | None = None, loss_fn: Callable[..., Any] = squares
) -> tuple[Tensor, Any]:
    """Return loss and output of a training step. Without a schedule, call the module, then run the backward."""
    if isinstance(module, GPipe) and schedule == ALL_ROWS:
        return module.step(x, loss_fn=lambda *of_all: loss_fn(*of_all), return_outputs=True)
    if isinstance(module, GPipe) and schedule is not None:
        reduction = None if loss_fn is counted else "sum"
        return module.step(x, loss_fn=loss_fn, schedule=schedule, reduction=reduction, return_outputs=True)
    output = module(x)
    loss = loss_fn(output, None)
    if isinstance(loss, tuple):
        loss = loss[0] / loss[1]
    loss.backward()
    return loss.detach(), output.detach()


def started(function: Callable[[], Any]) -> Future[Any]:
    """Call ``function`` on a new thread, and return a future of its result."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def hook(parameter: Tensor, kind: str, name: Any, calls: list[Any]) -> None:
    """Note what a parameter's gradient is: before it is added, changed as well, or afterwards."""
    if kind == "see":
        parameter.register_hook(lambda gradient: calls.append((name, gradient.clone())))
    elif kind == "scale":
        parameter.register_hook(lambda gradient: calls.append((name, gradient.clone())) or gradient * 0.5 + 1)
    else:
        parameter.register_post_accumulate_grad_hook(lambda p: calls.append((name, p.grad.clone())))


def state(module: nn.Module) -> Any:
    """Everything that a failed construction may not change."""
    return (
        [(name, id(each), type(each), each.training) for name, each in module.named_modules()],
        [(name, id(p), p.device, p.data_ptr(), id(p.grad)) for name, p in module.named_parameters()],
        [(name, id(b), b.device, b.data_ptr()) for name, b in module.named_buffers()],
    )


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return the result of ``function`` on a new thread, or raise TimeoutError.

    ``seconds`` suffice on an idle machine; the limit is ten times as long, for busy ones.
    """
    return started(function).result(10 * seconds)


def running(inline: bool) -> AbstractContextManager[None]:
    """Around runs: on the caller's thread, or on workers."""
    return gpipe.inline() if inline else nullcontext()
