"""Failures half-way, while work is queued: nothing is out of order then, nor in the step after."""

from itertools import count

import pytest
from packages.gpipe.tests.models import Failing
from torch import nn

from .models import SCHEDULED, assert_trains_like, model, piped, rows, running, some_of, trained
from .placements import backward_streams, forward_streams

pytestmark = [
    # torch warns once per process: a failure keeps nodes alive that belong to previous streams.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
]


def failing(backward: bool) -> Failing:
    """The identity, but for its second call, which fails: in its forward, or in its backward."""
    calls, wanted = count(1), "backward" if backward else "forward"
    error = ValueError("half-way on this device")
    return Failing(lambda phase, _: error if phase == wanted and next(calls) == 2 else None)


CROSSING = ["three devices", "two devices", "CPU between", "device between CPUs"]


@pytest.mark.parametrize(
    ("placement", "inline", "how", "where", "backward"),
    some_of(CROSSING, [False, True], SCHEDULED, ["first", "last"], [False, True], every=3),
)
def test_failures(placement: str, inline: bool, how: str, where: str, backward: bool):
    plain = model()
    layers = [failing(backward), *plain] if where == "first" else [*plain, failing(backward)]
    pipe = piped(nn.Sequential(*layers), placement, "never")
    with running(inline), pytest.raises(ValueError, match="half-way") as failed:
        trained(pipe, rows().to(pipe.devices[0]), how, "own")
    assert not any("was moved" in note for note in failed.value.__notes__)
    pipe.zero_grad()
    assert_trains_like(plain, pipe, how, "own", inline=inline)


def test_gradients_may_be_zeroed_right_after_a_failure():
    """Streams that differ from the forward's wait for unfinished work of the stages."""
    pipe = piped(nn.Sequential(failing(backward=True), *model()), "three devices", "never")
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
