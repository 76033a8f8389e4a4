"""Features of models and steps on accelerators: no races, and the same results as a pipe on the CPU.

The CPU pipe uses the same micro-batches, so that even results that depend on the split are equal.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packages.gpipe.tests.layers import Call, Layer, squares
from packages.gpipe.tests.models import InPlace
from torch import Tensor, nn

import gpipe
from gpipe import GPipe, LossSum
from microbatch import map_tensors

from .models import ROWS, WIDTH, Pop, Stash, balance, linear, rows, running, some_of
from .placements import backward_streams, devices, forward_streams

SCHEDULES = ("fill_drain", "1f1b", "zero_bubble")
CROSSING = ("three devices", "two devices", "CPU between", "device between CPUs")


def counted(output: Tensor, target: Tensor) -> LossSum:
    """The sum of the losses of the rows that count, and how many these are."""
    counts = target[:, 0] > 0
    return LossSum(((output - target).square().mean(1) * counts).sum(), counts.sum())


def values(x: Tensor) -> Any:
    """Return a tuple with integers, None, and a tensor that requires no grad."""
    return (x.detach() * 3).long(), None, x * 1, x.detach() > 0


def tensors(s: Layer, value: Any) -> Tensor:
    """Back to a tensor, through a layer on the way."""
    integers, nothing, x, positive = value
    assert nothing is None
    return s.m[0](x) * positive + integers


class Hooked(nn.Module):
    """Has hooks on its parameters and on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.inner.weight.register_hook(lambda gradient: gradient * 2)
        self.inner.bias.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + 1)
        return y


def normalised() -> nn.Module:
    return nn.BatchNorm1d(WIDTH, dtype=torch.float64)


MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "batch norm": lambda: [linear(), normalised(), nn.Tanh(), linear(), normalised(), linear()],
    "hooks": lambda: [Hooked(), nn.Tanh(), Hooked(), nn.Tanh(), linear(), Hooked()],
    "values": lambda: [
        linear(),
        Call(values),
        Layer(tensors, linear()),
        Call(values),
        Layer(tensors, linear()),
        linear(),
    ],
    "in place": lambda: [linear(), InPlace(), nn.GELU(), InPlace(), InPlace(), linear()],
    "skip": lambda: [linear(), Stash(), nn.Tanh(), linear(), Pop(), linear()],
}


def made(layers: Callable[[], list[nn.Module]]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers())


def pair(plain: nn.Sequential, placement: str, mode: str, **options: Any) -> tuple[GPipe, GPipe]:
    """A pipe on that placement, and the same one on the CPU."""
    places = devices(placement)
    sizes = balance(len(plain), len(places))

    def pipe(on: list[torch.device]) -> GPipe:
        options.setdefault("deferred_batch_norm", True)
        return GPipe(copy.deepcopy(plain), sizes, devices=on, chunks=3, checkpoint=mode, **options)

    return pipe(places), pipe([torch.device("cpu")] * len(places))


def state(pipe: nn.Module) -> list[Tensor]:
    """Parameters, gradients and buffers, on the CPU."""
    parameters = list(pipe.parameters())
    given = [*parameters, *[p.grad for p in parameters if p.grad is not None], *pipe.buffers()]
    return [tensor.detach().cpu() for tensor in given]


def train(pipe: GPipe, schedule: str | None, streams: str = "own", **options: Any) -> list[Any]:
    """Two steps with an optimizer, as people write them; what was returned."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    given = []
    target = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with forward_streams(streams):
        for _ in range(2):
            optimizer.zero_grad()
            returned = pipe.step(rows(), target, schedule=schedule, **options)
            optimizer.step()
            given.append(map_tensors(lambda tensor: tensor.detach().cpu(), returned))
        return [*given, state(pipe)]


@pytest.mark.parametrize(
    ("name", "placement", "mode", "inline", "schedule"),
    some_of(MODELS, CROSSING, ["never", "always"], [False, True], SCHEDULES, every=17),
)
def test_steps(name: str, placement: str, mode: str, inline: bool, schedule: str):
    pipe, oracle = pair(made(MODELS[name]), placement, mode)
    options: dict[str, Any] = {"loss_fn": counted, "return_outputs": True}
    wanted = train(oracle, schedule, **options)
    with running(inline), gpipe.record() as timeline:
        torch.testing.assert_close(train(pipe, schedule, **options), wanted)
    assert {event.device for event in timeline.events} == {str(d) for d in devices(placement)}


def standardized(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss that uses statistics of the full batch, with one metric per batch and one per row."""
    found = (output - output.mean(0)) / (output.var(0) + 1).sqrt() - target
    return found.square().mean(), {"largest": output.max(), "rows": output.sum(1)}


@pytest.mark.parametrize(
    ("name", "placement", "mode", "inline", "schedule"),
    some_of(MODELS, CROSSING, ["never", "always"], [False, True], [None, "fill_drain"], every=17),
)
def test_steps_with_a_loss_of_all_rows(name: str, placement: str, mode: str, inline: bool, schedule: str | None):
    """A tensor that is changed in place, or has hooks, may be an output, and the loss is computed later."""
    pipe, oracle = pair(made(MODELS[name]), placement, mode)
    wanted = train(oracle, schedule, loss_fn=standardized, return_outputs=True)
    with running(inline):
        torch.testing.assert_close(train(pipe, schedule, loss_fn=standardized, return_outputs=True), wanted)


@pytest.mark.parametrize(
    ("name", "placement", "mode", "inline"), some_of(MODELS, CROSSING, ["never", "always"], [False, True], every=7)
)
def test_calls(name: str, placement: str, mode: str, inline: bool):
    """The forward is on new streams, and the backward on different ones; then without grad."""
    pipe, oracle = pair(made(MODELS[name]), placement, mode)

    def used(pipe: GPipe) -> list[Tensor]:
        with forward_streams("own"):
            loss = pipe(rows()).square().sum()
            with backward_streams("foreign"):
                loss.backward()
            pipe.eval()
            with torch.no_grad():
                output = pipe(rows()).cpu()
        return [loss.detach().cpu(), output, *state(pipe)]

    wanted = used(oracle)
    with running(inline):
        torch.testing.assert_close(used(pipe), wanted)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("placement", CROSSING)
@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
@pytest.mark.parametrize("how", ["call", *SCHEDULES])
def test_dropout(placement: str, inline: bool, how: str):
    """A recomputation repeats the masks, and with one seed every mode gives the same."""
    found = []
    for mode in ("never", "except_last", "always"):
        plain = made(lambda: [linear(), nn.Dropout(), linear(), nn.Dropout(), nn.Dropout(), linear()])
        pipe, _ = pair(plain, placement, mode)
        torch.manual_seed(1)
        with running(inline), forward_streams("own"):
            if how == "call":
                pipe(rows()).square().sum().backward()
            else:
                pipe.step(rows(), loss_fn=squares, reduction="sum", schedule=how)
            found.append(state(pipe))
    torch.testing.assert_close(found[1:], [found[0]] * 2)
