"""Timing, with a clock that only layers advance."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from profiler import profile, profile_seconds, profile_times

from .strategies import Call, fewer


class Clock:
    now = 0.0


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: Clock.now)


class Timed(torch.autograd.Function):
    """The identity, which advances the clock by the next number of seconds in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Iterator[float], backward: Iterator[float]) -> torch.Tensor:
        Clock.now += next(forward)
        ctx.backward = backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        Clock.now += next(ctx.backward)
        return gradient, None, None


class Slow(nn.Module):
    """Takes 5 seconds forward and 7 backward, or the next of others each time."""

    def __init__(self, forward: tuple[float, ...] = (5,) * 999, backward: tuple[float, ...] = (7,) * 999) -> None:
        super().__init__()
        self.seconds = iter(forward), iter(backward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Timed.apply(x, *self.seconds)  # type: ignore[no-any-return]


class Weighted(nn.Module):
    """A layer that takes 4 seconds for the gradient of the input, and 3 for the weight's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.input, self.own = Slow((0,) * 99, (4,) * 99), Slow((0,) * 99, (3,) * 99)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.input(x) * self.own(self.weight)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("layer", "requires_grad", "expected"),
    [
        (Weighted(), True, (0, 7, 4)),
        (Weighted(), False, (0, 3, 0)),
        (nn.ReLU(), True, (0, 0, 0)),
        (Call(lambda x: x.mul_(2)), True, (0, 0, 0)),
    ],
)
def test_the_part_of_the_backward_for_the_inputs(layer, requires_grad, expected):
    x = torch.rand(2, 3, requires_grad=requires_grad)
    found, _ = profile(nn.Sequential(layer, Slow()), x, device="cpu", timeout=1, split_backward=True)
    assert (found.forward_seconds, found.backward_seconds, found.backward_input_seconds) == expected


def test_forward_and_backward_have_separate_medians():
    """The first round is a warm-up."""
    layer = Slow((99, 1, 5, 3), (99, 9, 2, 4))
    (found,) = profile(nn.Sequential(layer), torch.rand(2, requires_grad=True), device="cpu", timeout=1)
    assert (found.forward_seconds, found.backward_seconds) == (3, 4)


def test_every_round_starts_without_gradients():
    """Accumulating a gradient costs more than a first one, and training steps usually start without gradients."""
    seen = []

    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            seen.append((x.tolist(), self.weight.grad))
            return x.add_(1) * self.weight

    profile(nn.Sequential(Adds(), Slow()), torch.zeros(2, requires_grad=True), device="cpu", timeout=1)
    assert seen == [([0, 0], None)] * 5  # one to warm up, three with a clock, one to count


@fewer
@given(st.booleans(), st.booleans(), st.integers(1, 3))
def test_times_do_not_depend_on_grad_mode(grad, inference, layers):
    x = torch.rand(2, requires_grad=True)
    model = nn.Sequential(*(Slow() for _ in range(layers)))
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        summed = profile_times(model, x, 30, "cpu")
        medians = profile_seconds(model, x, timeout=30, device="cpu")
        found = profile(model, x, device="cpu", timeout=1)
    assert summed == [12_000_000 * -(-30 // (12 * layers))] * layers
    assert medians == [12] * layers
    assert [(each.forward_seconds, each.backward_seconds) for each in found] == [(5, 7)] * layers
