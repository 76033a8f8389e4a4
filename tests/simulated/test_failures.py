"""Failures half-way, while work is queued: nothing is out of order then, nor in the step after."""

from __future__ import annotations

import pytest
from packages.gpipe.tests.layers import Raise
from torch import Tensor, nn

from .models import SCHEDULED, assert_trains_like, model, piped, rows, running, some_of, trained
from .placements import backward_streams, forward_streams

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
