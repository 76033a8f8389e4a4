"""Stages whose parameters are on the host: no races, as the plain model, and two stages on a device at a time."""

import gc

import pytest
import torch
from torch import nn

from gpipe import GPipe
from gpipe.engine._offloaded import Offloaded

from . import accelerator, test_model, test_tied
from .models import HOWS, MODES, assert_trains_like, model, piped, some_of, squares, whole_squares

# torch warns once per process: the copy of a parameter is used on different streams in each step.
pytestmark = [pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")]

PLACEMENTS = ("two devices", "three devices", "the first device twice", "CPU between")


@pytest.mark.parametrize(
    ("placement", "how", "streams", "mode", "inline", "shares"),
    some_of(
        PLACEMENTS,
        [how for how in HOWS if how != "interleaved"],
        ["default", "own"],
        MODES,
        [False, True],
        [False, True],
    ),
)
def test_in_order_and_equal(placement: str, how: str, streams: str, mode: str, inline: bool, shares: bool):
    plain = test_tied.model() if shares else model()
    with accelerator.no_races():
        assert_trains_like(plain, piped(plain, placement, mode, offload=True), how, streams, inline=inline)


@pytest.mark.parametrize(
    ("name", "placement", "how", "mode", "whole"),
    some_of(
        test_model.MODELS, PLACEMENTS, [how for how in HOWS if how != "interleaved"], MODES, [False, True], every=29
    ),
)
def test_a_model_with_operations_between_blocks(name: str, placement: str, how: str, mode: str, whole: bool):
    """A loss of the full output uses parameters of the model that are not loaded."""
    plain = test_model.made(name)
    pipe = test_model.piped(plain, placement, mode, offload=True)
    loss = {"loss_fn": whole_squares} if whole and how == "fill_drain" else {}
    with accelerator.no_races():
        assert_trains_like(plain, pipe, how, "own", **loss)


LAYER = 64 * 64 * 4
"""Bytes of the weight of a layer."""


def eight_layers(**options: object) -> GPipe:
    """Eight stages of a layer each, on the first device."""
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    return GPipe(layers, [1] * 8, devices=[accelerator.device(0)] * 8, chunks=2, **options)


def trains_within(pipe: GPipe, size: int, how: str) -> bool:
    """Return whether a step fits in ``size`` bytes of the device, more than are in use between steps."""
    x = torch.randn(4, 64).to(accelerator.device(0))
    pipe.zero_grad()
    gc.collect()
    try:
        with accelerator.limited(0, size):
            if how == "call":
                pipe(x).square().sum().backward()
            else:
                pipe.step(x, loss_fn=squares, reduction="sum")
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.parametrize("how", ["call", "step"])
@pytest.mark.parametrize("mode", MODES)
def test_a_device_holds_two_stages_at_a_time(mode: str, how: str):
    """It also holds one stage's gradient, and activations, which are small here."""
    pipe = eight_layers(checkpoint=mode, offload=True)
    assert trains_within(pipe, 5 * LAYER, how)
    assert not trains_within(pipe, 2 * LAYER, how)


@pytest.mark.parametrize("trains", [False, True])
def test_nothing_remains_on_the_device(trains: bool):
    pipe = eight_layers(offload=True)
    x = torch.randn(4, 64).to(accelerator.device(0))
    before = accelerator.used()
    for _ in range(2):
        if trains:
            pipe.step(x, loss_fn=squares, reduction="sum")
        else:
            pipe.evaluate(x, loss_fn=squares, reduction="sum")
        pipe.close()
    assert all(parameter.is_cpu for parameter in pipe.parameters())
    assert all(parameter.grad.is_cpu for parameter in pipe.parameters() if trains)
    assert accelerator.used() <= before + 1024


@pytest.mark.parametrize("offload", [True, torch.float64])
def test_stages_load_twice_without_blocking_host(offload: bool | torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """The two stages that are computed last stay until their backwards."""
    pipe, seen = eight_layers(offload=offload), []
    leave = Offloaded.leave

    def watched(self: Offloaded) -> None:
        seen.append(accelerator.library().take_counters())
        leave(self)

    x = torch.randn(4, 64, dtype=torch.float32 if offload is True else offload).to(accelerator.device(0))
    with accelerator.no_races():
        pipe.step(x, loss_fn=squares, reduction="sum")
    accelerator.library().take_counters()
    with monkeypatch.context() as patched:
        patched.setattr(Offloaded, "leave", watched)
        pipe.step(x, loss_fn=squares, reduction="sum")
    assert seen[0]["copies"] == 8 + 6 + 8  # loads for forwards and for backwards, and gradients
    assert seen[0]["synchronisations"] == 0


def test_updates_right_after_step_and_evaluation():
    pipe, plain, x = offloaded_and_plain()
    with accelerator.no_races():
        for _ in range(2):
            pipe.zero_grad()
            plain.zero_grad()
            pipe.step(x.to(accelerator.device(0)), loss_fn=squares, reduction="sum")
            squares(plain(x)).backward()
            torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])
            pipe.evaluate(x.to(accelerator.device(0)), loss_fn=squares, reduction="sum")
            with torch.no_grad():
                for parameter in (*pipe.parameters(), *plain.parameters()):
                    parameter.mul_(0.9)
    pipe.close()


def test_updates_during_a_step():
    pipe, plain, x = offloaded_and_plain()
    ours, its = (torch.optim.SGD(each.parameters(), lr=1e-3, momentum=0.9) for each in (pipe, plain))
    with accelerator.no_races():
        for _ in range(3):
            pipe.step(x.to(accelerator.device(0)), loss_fn=squares, reduction="sum", optimizer=ours)
            squares(plain(x)).backward()
            its.step()
            its.zero_grad()
            torch.testing.assert_close([*pipe.parameters()], [*plain.parameters()])
    pipe.close()


def offloaded_and_plain() -> tuple[GPipe, nn.Sequential, torch.Tensor]:
    """A pipe with ``offload=True``, the same model without one, and rows for both."""
    torch.manual_seed(0)
    pipe, plain = eight_layers(offload=True), nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    plain.load_state_dict(pipe.state_dict())
    return pipe, plain, torch.randn(4, 64)
