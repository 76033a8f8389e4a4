"""Random numbers of layers on devices with their own generators."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe import GPipe
from gpipe.checkpoint import _device_generator, _random
from gpipe.checkpoint._device_generator import DeviceGenerator
from gpipe.engine import _stage

from ..layers import Call, each_mode, each_way

XPU = torch.device("xpu", 0)


@pytest.fixture
def elsewhere(monkeypatch):
    """Make all random operations appear to be on a device whose generator torch cannot restore."""
    monkeypatch.setattr(_random, "find_device", lambda args, kwargs: torch.device("hpu", 0))


@each_way
@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_unrepeatable_dropout_raises(mode, way, elsewhere):
    pipe = GPipe(nn.Sequential(nn.Identity(), nn.Dropout()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=mode)
    with way(), pytest.raises(RuntimeError, match=r"draws random numbers on 'hpu:0'.*checkpoint='never'") as caught:
        pipe(torch.ones(4, 4))
    assert any("partition 1" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("device", [torch.device("xpu", 1), torch.device("cuda"), torch.device("meta")])
def test_only_the_device_of_the_partition_is_rewound(device, monkeypatch):
    """Another one may be drawing for its own partition at the same time."""
    module = SimpleNamespace(get_rng_state=lambda device: torch.empty(0))
    monkeypatch.setattr(_device_generator, "get_device_module", lambda device: module)
    generator = DeviceGenerator(XPU)
    generator.expect_repeats(torch.device("xpu"))
    with nullcontext() if device.type == "meta" else pytest.raises(RuntimeError, match="own device, 'xpu:0'"):
        generator.expect_repeats(device)


@pytest.fixture
def on_a_device(monkeypatch):
    """Treat random CPU operations as operations of a device, whose generator is the CPU's."""
    own = {torch.device("cpu"): torch}  # the device of the stage
    module = SimpleNamespace(
        get_rng_state=lambda device: own[device].get_rng_state(),
        set_rng_state=lambda state, device: own[device].set_rng_state(state),
    )
    monkeypatch.setattr(_device_generator, "get_device_module", lambda device: module)
    monkeypatch.setattr(_stage, "has_streams", lambda device: True)
    monkeypatch.setattr(_random, "find_device", lambda args, kwargs: XPU)
    monkeypatch.setattr(_device_generator, "_is_same", lambda device, own: True)


@pytest.mark.usefixtures("on_a_device")
@each_mode
@pytest.mark.parametrize(
    "inner", [lambda act, x: act(x), partial(checkpoint, use_reentrant=False)], ids=["alone", "checkpoint"]
)
def test_recomputation_repeats_device_random_numbers(mode, inner):
    """torch.utils.checkpoint may be nested, and the layer may begin later. The device's generator is restored."""
    drawing = [False]
    act = lambda x: nn.functional.dropout(x, training=drawing[0]) * 1  # noqa: E731
    pipe = GPipe(nn.Sequential(Call(lambda x: inner(act, x))), [1], devices=["cpu"], chunks=3, checkpoint=mode)
    for drawing[0] in (False, False, True, True):
        x = torch.ones(6, 8, requires_grad=True)
        output, state = pipe(x), torch.get_rng_state()
        output.sum().backward()
        assert torch.equal(x.grad, output)
        assert torch.equal(torch.get_rng_state(), state)
