"""The split backward does what the whole one does: the same gradients to the last bit, the same hooks, once each."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gpipe
from gpipe.engine._split_backward import backward_inputs

from ..layers import DOUBLE, Layer, assert_same, gradients, linears, piped, rows


class Square(torch.autograd.Function):
    """A function of input and weight, with a single backward for both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.square() * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * 2 * x * weight, (gradient * x.square()).sum(tuple(range(gradient.dim() - 1)))


def residual() -> nn.Module:
    parts = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
    return Layer(lambda s, x: x + s.m[2](F.gelu(s.m[1](s.m[0](x)))), *parts)


def chunks(s: Layer, x: Tensor) -> Tensor:
    """A node with several outputs, one of them unused."""
    a, _, c = s.m[0](x).chunk(3, -1)
    return a * c.sigmoid()


def recurrent(kind: type[nn.RNNBase]) -> nn.Module:
    return Layer(lambda s, x: s.m[0](x)[0], kind(6, 6, num_layers=2, batch_first=True))


def by_hook(s: Layer, x: Tensor) -> Tensor:
    """Changes a gradient on its way."""
    h = s.m[0](x)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient * 3)
    return h.tanh()


def channels_last(layer: Layer, x: Tensor) -> Tensor:
    return layer.m[0](x.unflatten(2, (2, 3)).contiguous(memory_format=torch.channels_last)).flatten(2)


def ones() -> nn.Parameter:
    return nn.Parameter(torch.ones(6))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(inplace=True))


# More layers are in random models: see test_split_backward_and_recomputation_are_exact.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "conv, batch norm, relu in place": conv,
    "residual layer norm": residual,
    "group norm": lambda: nn.GroupNorm(2, 4),
    "group norm, channels last": lambda: Layer(channels_last, nn.GroupNorm(2, 4)),
    "prelu": lambda: nn.PReLU(),
    "shared weights": lambda: Layer(lambda s, x: s.m[0](s.m[0](x).tanh()), nn.Linear(6, 6)),
    "custom function": lambda: Layer(lambda s, x: Square.apply(x, s.weight), weight=ones()),
    "custom functions of one side": lambda: Layer(
        lambda s, x: Square.apply(x, s.one) * Square.apply(s.weight, s.one), weight=ones(), one=torch.ones(6)
    ),
    "several outputs": lambda: Layer(chunks, nn.Linear(6, 18)),
    "gru": lambda: recurrent(nn.GRU),
    "checkpointed": lambda: Layer(lambda s, x: checkpoint(s.m[0], x, use_reentrant=False), residual()),
    "hook on the way": lambda: Layer(by_hook, nn.Linear(6, 6)),
    "parameters alone": lambda: Layer(lambda s, x: x + (s.bias.exp() * s.scale).tanh(), bias=ones(), scale=ones()),
    "nothing": nn.Identity,
}
WHOLE = {
    *("shared weights", "custom function", "custom functions of one side", "gru", "hook on the way"),
    *("group norm", "group norm, channels last", "checkpointed"),
}
"""Layers whose backward cannot be split."""


def model_of(names: list[str]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(LAYERS[name]() for name in names))


def sample(count: int = 6) -> Tensor:
    return torch.randn(count, 4, 6, generator=torch.Generator().manual_seed(4))


def trained(model: nn.Sequential, balance: list[int], schedule: str, mode: str, grad: bool) -> dict[str, Any]:
    """Return the results of two steps."""
    pipe = piped(model, balance, chunks=3, checkpoint=mode)
    x = sample().requires_grad_(grad)
    with gpipe.inline():
        torch.manual_seed(0)
        for k in range(2):
            pipe.step(x * (k + 1), sample(), loss_fn=F.mse_loss, schedule=schedule)
    return {"input": x.grad, **gradients(pipe), **dict(pipe.named_buffers())}


@pytest.mark.parametrize("name", sorted(LAYERS))
@pytest.mark.parametrize("grad", [True, False])
def test_each_layer_in_each_place(name: str, grad: bool, caplog: pytest.LogCaptureFixture):
    model = nn.Sequential(nn.Tanh() if grad else nn.Linear(6, 6), *model_of([name] * 3))
    whole = trained(model, [2, 1, 1], "1f1b", "never", grad)
    with caplog.at_level(logging.WARNING, "gpipe"):
        split = trained(model, [2, 1, 1], "zero_bubble", "never", grad)
    torch.testing.assert_close(split, whole, rtol=0, atol=0)
    said = [record.getMessage() for record in caplog.records]
    partitions = (range(3) if grad else range(1, 3)) if name in WHOLE else ()
    assert sorted(said) == [
        f"the backward of partition {j} cannot be split into inputs and weights; it runs whole" for j in partitions
    ]


def test_modules_whose_hooks_change_gradients():
    model = linears()
    for layer in model:
        layer.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 2,))
        layer.register_full_backward_pre_hook(lambda module, grad_output: (grad_output[0] * 3,))
    pipe, x, y = piped(model, [1, 1, 1], chunks=3), rows(grad=True), rows(grad=True)
    pipe.step(x, rows(), loss_fn=F.mse_loss, schedule="zero_bubble")
    F.mse_loss(model(y), rows()).backward()
    assert_same(pipe, model)
    torch.testing.assert_close(x.grad, y.grad)


def test_deep_graphs():
    """Without recursion."""
    layer, leaf = nn.Linear(3, 3, dtype=DOUBLE), rows(grad=True)
    output = layer(leaf)
    for _ in range(5000):
        output = output * 1.0
    parts = backward_inputs([output], [torch.ones_like(output)], [leaf])
    assert parts is not None
    parts[1][0].backward()
    torch.testing.assert_close(layer.bias.grad, torch.full((3,), 6.0, dtype=DOUBLE))


def test_previous_stage_may_overwrite_its_gradient() -> None:
    """The weight gradients of this stage may still need the same tensor."""
    x, weight = torch.ones(4, requires_grad=True), nn.Parameter(torch.ones(4))
    y = x + weight
    parts = backward_inputs([y], [torch.ones(4)], [x])
    assert parts is not None
    (flowed,), (left,) = parts
    assert flowed is not None
    flowed.mul_(2)
    left.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1] * 4
