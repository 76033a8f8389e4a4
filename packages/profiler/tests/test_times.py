import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from microbatch import Batch
from profiler import profile, profile_seconds, profile_times
from profiler._clock import Timer
from profiler._times import measure

from .strategies import fewer

CPU = torch.device("cpu")


class Clock:
    """Goes on by `step` seconds whenever it is read."""

    def __init__(self, step=1.0):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


class Timed(torch.autograd.Function):
    """The identity; its backward turns the clock on by so many seconds."""

    @staticmethod
    def forward(ctx, x, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.now += ctx.seconds
        return gradient, None, None


class Weighted(nn.Module):
    """4 seconds for the gradient of the input, 3 for that of the weight."""

    def __init__(self, clock):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.clock = clock

    def __deepcopy__(self, memo):
        return Weighted(self.clock)

    def forward(self, x):
        return Timed.apply(x, self.clock, 4) * Timed.apply(self.weight, self.clock, 3)


class Overwriting(nn.Module):
    def forward(self, x):
        return x.mul_(2)


@pytest.mark.parametrize(
    ("layer", "requires_grad", "expected"),
    [
        (Weighted, True, (0, 7, 4)),
        (Weighted, False, (0, 3, 0)),
        (lambda _: nn.ReLU(), True, (0, 0, 0)),
        (lambda _: Overwriting(), True, (0, 0, 0)),
    ],
)
def test_the_part_of_the_backward_for_the_inputs(layer, requires_grad, expected):
    clock = Clock(step=0.0)
    rounds = measure(
        nn.Sequential(layer(clock)),
        Batch(torch.rand(2, 3, requires_grad=requires_grad)),
        CPU,
        timeout=1e-6,
        least=1,
        split=True,
        watch=Timer(clock, lambda start, end: end - start),
        clock=itertools.count().__next__,
    )
    assert rounds[0] == [expected]


def test_gradients_do_not_add_up_from_round_to_round():
    """An accumulation costs more than a first gradient, which is what most steps of training have."""
    grads = []

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            grads.append(self.weight.grad)
            return x * self.weight

    measure(nn.Sequential(Looks()), Batch(torch.rand(2, 3)), CPU, timeout=1e-6, least=3)
    assert grads == [None] * 4


def test_every_round_starts_with_the_sample():
    seen = []

    class Add(nn.Module):
        def forward(self, x):
            seen.append(x.detach().clone())
            return x.add_(1)

    sample = torch.zeros(2, requires_grad=True)
    measure(nn.Sequential(Add()), Batch(sample), CPU, timeout=1e-6, least=3)
    assert len(seen) == 4  # one to warm up
    assert all(torch.equal(x, torch.zeros(2)) for x in seen)


class Slow(nn.Module):
    """Takes 5 seconds forward and 7 backward, by the clock of the process."""

    clock = 0.0

    def forward(self, x):
        return Pass.apply(x)


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        Slow.clock += 5
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        Slow.clock += 7
        return gradient


@fewer
@given(st.booleans(), st.booleans(), st.integers(1, 3))
def test_both_ways_give_forward_and_backward_whatever_the_callers_grad_mode(grad, inference, layers):
    x = torch.rand(2, requires_grad=True)
    model = nn.Sequential(*(Slow() for _ in range(layers)))
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(inference), torch.set_grad_enabled(grad):
        patch.setattr("time.perf_counter", lambda: Slow.clock)
        summed = profile_times(model, x, 30, "cpu")
        medians = profile_seconds(model, x, timeout=30, device="cpu")
        found = profile(model, x, device="cpu", timeout=1)
    assert [round(each / 12e6) for each in summed] == [-(-30 // (12 * layers))] * layers
    assert [round(each) for each in medians] == [12] * layers
    assert [(round(each.forward_seconds), round(each.backward_seconds)) for each in found] == [(5, 7)] * layers
