"""Failures half-way, while work is queued: nothing is out of order then, nor in the step after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packages.gpipe.tests.layers import Raise
from torch import Tensor, nn

from .accelerator import limited
from .models import SCHEDULED, assert_trains_like, model, piped, rows, running, some_of, trained
from .placements import PLACEMENTS, backward_streams, forward_streams

pytestmark = [
    # Of torch, once a process: a failure keeps nodes alive, which belong to the streams of their time.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]


class Fails(nn.Module):
    """The identity, but for the call that fails: in its forward, or in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.call: int | None = None
        self.error: BaseException = ValueError("half-way")
        self.backward = False
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        if self.call is None or self._calls != self.call:
            return x * 1
        if self.backward:
            return Raise.apply(x, self.error)
        raise self.error


CROSSING = ["three devices", "two devices", "CPU between", "device between CPUs"]


@pytest.mark.parametrize(
    ("placement", "inline", "how", "where", "backward"),
    some_of(CROSSING, [False, True], SCHEDULED, ["first", "last"], [False, True], every=3),
)
def test_failures(placement: str, inline: bool, how: str, where: str, backward: bool):
    plain = model()
    fails = Fails()
    layers = [fails, *plain] if where == "first" else [*plain, fails]
    pipe = piped(nn.Sequential(*layers), placement, "never")
    there = next(layer for layer in pipe if isinstance(layer, Fails))
    there.call, there.backward = 2, backward
    with running(inline), pytest.raises(ValueError, match="half-way"):
        trained(pipe, rows().to(pipe.devices[0]), how, "own")
    pipe.zero_grad()
    assert_trains_like(plain, pipe, how, "own", inline=inline)


class Greedy(nn.Module):
    """Takes much memory in its backward, for a moment."""

    def forward(self, x: Tensor) -> Tensor:
        return _Greedy.apply(x)


class _Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.empty(1 << 20, dtype=torch.uint8, device=gradient.device)
        return gradient * 1


@pytest.mark.parametrize("placement", [name for name, places in PLACEMENTS.items() if places[-1] is not None])
@pytest.mark.parametrize("how", SCHEDULED)
def test_a_device_that_has_too_little_memory_for_a_backward(placement: str, how: str):
    plain = nn.Sequential(*model(), Greedy())
    pipe = piped(plain, placement)
    last = PLACEMENTS[placement][-1]
    assert last is not None
    with limited(last, 1 << 19), pytest.raises(torch.OutOfMemoryError):
        trained(pipe, rows().to(pipe.devices[0]), how, "own")
    pipe.zero_grad()
    assert_trains_like(plain, pipe, how, "own")


class Wasteful(nn.Module):
    """Takes memory by its rows, for a moment."""

    def forward(self, x: Tensor) -> Tensor:
        torch.empty(len(x) << 20, dtype=torch.uint8, device=x.device)
        return x * 1


@pytest.mark.parametrize("placement", [name for name, places in PLACEMENTS.items() if places[-1] is not None])
@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
def test_after_a_step_that_ran_out_of_memory_one_with_more_chunks_is_right(placement: str, inline: bool):
    plain = nn.Sequential(*model(), Wasteful())
    pipe = piped(plain, placement)
    pipe.chunks = 2
    last = PLACEMENTS[placement][-1]
    assert last is not None
    x = rows().to(pipe.devices[0])
    with running(inline), limited(last, len(x) << 19):
        with pytest.raises(torch.OutOfMemoryError):
            pipe.step(x, loss_fn=lambda output: output.square().mean())
        pipe.chunks = 4
        loss = pipe.step(x, loss_fn=lambda output: output.square().mean())
    expected = plain(rows()).square().mean()
    torch.testing.assert_close(loss.cpu(), expected.detach())


def test_gradients_may_be_zeroed_right_after_a_failure():
    """Also on other streams than the forward's: these wait for what the stages were still doing."""
    pipe = piped(nn.Sequential(Fails(), *model()), "three devices", "never")
    pipe[0].call, pipe[0].backward = 2, True
    x = rows().to(pipe.devices[0]).requires_grad_()
    with forward_streams("foreign"):
        loss = pipe(x).square().sum()
        with backward_streams("foreign"):
            pipe.zero_grad(set_to_none=False)
            with pytest.raises(ValueError, match="half-way"):
                loss.backward()
            for parameter in pipe.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
    pipe.close()
