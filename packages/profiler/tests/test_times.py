import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from microbatch import Batch
from profiler import profile_times
from profiler._times import measure
from profiler._watch import HostWatch

from .strategies import models, samples

CPU = torch.device("cpu")


class Clock:
    """Goes on by `step` seconds whenever it is read."""

    def __init__(self, step=1.0):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


@given(models(), samples())
def test_a_number_for_every_layer(model, sample):
    times = profile_times(model, sample, 1e-6, "cpu")
    assert len(times) == len(model)
    assert all(isinstance(time, int) and time >= 0 for time in times)


@given(st.integers(1, 9), st.integers(0, 20))
def test_rounds_fill_the_time_and_are_never_too_few(least, timeout):
    # The clock is read once at the start and once before each round that is not owed.
    spent = []
    rounds = measure(
        nn.Sequential(nn.ReLU()),
        Batch(torch.rand(1)),
        CPU,
        timeout=timeout,
        least=least,
        clock=Clock(),
        after_round=spent.append,
    )
    assert len(rounds) >= least
    assert len(spent) == len(rounds)
    assert len(rounds) == least or spent[-2] < timeout


def test_forward_and_backward_are_timed_apart():
    class Slow(nn.Module):
        """Turns the clock on: 5 seconds in forward, 7 in backward."""

        def forward(self, x):
            return Turn.apply(x)

    class Turn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            clock.now += 5
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            clock.now += 7
            return gradient

    clock = Clock(step=0.0)
    model = nn.Sequential(nn.Linear(3, 3), Slow(), nn.ReLU())
    rounds = measure(
        model,
        Batch(torch.rand(2, 3)),
        CPU,
        timeout=1,
        least=2,
        watch=HostWatch(clock),
        clock=itertools.count().__next__,
    )
    assert rounds == [[(0, 0), (5, 7), (0, 0)]] * 2


def test_no_backward_takes_no_time():
    rounds = measure(
        nn.Sequential(nn.ReLU()), Batch(torch.rand(3)), CPU, timeout=1e-6, least=1, watch=HostWatch(Clock())
    )
    assert rounds == [[(1, 0)]]


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


def test_a_gradient_is_refused():
    model = nn.Sequential(nn.Conv2d(3, 3, 1))
    sample = torch.rand(1, 3, 8, 8)
    model(sample).norm().backward()
    with pytest.raises(ValueError, match=r"some parameter already has gradient \('0.weight'\)"):
        profile_times(model, sample, 1, "cpu")
