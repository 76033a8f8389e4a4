"""Gradients after a backward: None stays None, and values are unchanged."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import LossSum

from .layers import DOUBLE, MODES, Call, Layer, Overwrites, assert_same, blocks, linear, piped, rows, running
from .schedules import ALONE, balances


def shifted(s: Layer, x: Tensor) -> Tensor:
    """Hands the gradient that arrives at its parameter on as it is."""
    return x + (s.same if len(x) == 2 else s.shift)


def hooked(s: Layer, x: Tensor) -> Tensor:
    """A linear layer whose hook of a tensor changes the gradient there."""
    output = s.m[0](x)
    if output.requires_grad:
        output.register_hook(lambda gradient: None if gradient is None else gradient * 2)
    return output.sin() if s.inside else output


def residual(before: nn.Module, after: nn.Module) -> nn.Module:
    """Return a layer with two branches; the one computed last gets its gradient first."""

    def forward(s: Layer, x: Tensor) -> Tensor:
        first = s.m[0](x)
        return s.m[1](x) + first

    return Layer(forward, before, after)


def ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape, dtype=DOUBLE))


LAYERS = {
    "linear": linear,
    "shifted": lambda: Layer(shifted, shift=ones(3), same=ones(2, 3)),
    "blocks": lambda: Call(blocks),
    "overwrites": lambda: Call(Overwrites.apply),
    "in place": lambda: Call(lambda x: x.add_(1)),
    "hooked": lambda: Layer(hooked, linear(), inside=False),
    "hooked inside": lambda: Layer(hooked, linear(), inside=True),
    "residual": lambda: residual(linear(), nn.Sequential(linear(), Call(Overwrites.apply))),
    "corrupting": lambda: residual(nn.Sequential(linear(), Call(lambda x: x + 0)), Call(Overwrites.apply)),
}


@st.composite
def stacks(draw: st.DrawFn) -> tuple[nn.Sequential, list[int]]:
    names = ["linear", *draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(*(LAYERS[name]() for name in names))
    return model, draw(balances(len(names), 3))


@given(stacks(), st.sampled_from(ALONE), st.sampled_from(MODES), st.booleans(), st.booleans(), st.booleans())
def test_functions_that_block_or_overwrite_gradients(
    stack: tuple[nn.Sequential, list[int]], schedule: str, mode: str, inline: bool, grad: bool, counted: bool
):
    """The model sees micro-batches too, since some of the parameters fit one only."""
    model, balance = stack
    pipe = piped(model, balance, chunks=3, checkpoint=mode)
    x, y = rows(grad=grad), rows(grad=grad)
    with running(inline):
        pipe.step(
            x,
            loss_fn=lambda o, _: LossSum(o.square().sum(), len(o)) if counted else o.square().sum(),
            schedule=schedule,
            **({} if counted else {"reduction": "sum"}),
        )
    for part in y.chunk(3):
        (model(part * 1).square().sum() / (len(y) if counted else 1)).backward()
    pipe.close()
    assert_same(pipe, model)
    torch.testing.assert_close(x.grad, y.grad)
