"""Random numbers that layers draw on devices with generators of their own."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gpipe
from gpipe import GPipe
from gpipe.checkpoint import _device_generator, _random
from gpipe.checkpoint._device_generator import DeviceGenerator, expect_rewindable, module_of

XPU = torch.device("xpu", 0)


@pytest.fixture(params=["threads", "inline"])
def walked(request):
    with gpipe.inline() if request.param == "inline" else nullcontext():
        yield


@pytest.fixture
def elsewhere(monkeypatch):
    """Whatever draws seems to draw on a device whose generator torch cannot put back."""
    monkeypatch.setattr(_random, "_device", lambda args, kwargs: torch.device("hpu", 0))


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_dropout_under_checkpointing_is_refused_where_it_cannot_be_repeated(mode, walked, elsewhere):
    pipe = GPipe(nn.Sequential(nn.Identity(), nn.Dropout()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=mode)
    with pytest.raises(RuntimeError, match=r"draws random numbers on 'hpu:0'.*checkpoint='never'") as caught:
        pipe(torch.ones(4, 4))
    assert any("partition 1" in note for note in caught.value.__notes__)


def test_without_a_recomputation_nothing_is_to_be_repeated(walked, elsewhere):
    layers = nn.Sequential(nn.Dropout(), nn.Linear(4, 4))
    pipe = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    pipe(torch.ones(4, 4)).sum().backward()
    pipe.checkpoint = "always"
    with torch.no_grad():
        pipe.eval()(torch.ones(4, 4))


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("meta")])
def test_the_cpu_and_what_has_no_data_need_no_generator(device):
    expect_rewindable(device)
    assert module_of(device) is None
    with DeviceGenerator(device).rewound():
        pass


@given(before=st.integers(0, 3), inside=st.integers(0, 3), between=st.integers(0, 3))
def test_a_device_draws_again_and_goes_on_as_if_it_had_not(before, inside, between):
    """Property, of any module with the state of a generator: here that of the CPU."""
    calls = []
    module = SimpleNamespace(
        get_rng_state=lambda device: calls.append(device) or torch.get_rng_state(),
        set_rng_state=lambda state, device: calls.append(device) or torch.set_rng_state(state),
    )
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.setattr(_device_generator, "module_of", lambda device: module)
        torch.rand(before)
        generator = DeviceGenerator(XPU)
        first = torch.rand(8)
        torch.rand(between)
        state = torch.get_rng_state()
        with generator.rewound():
            assert torch.equal(torch.rand(8), first)
            torch.rand(inside)
        assert torch.equal(torch.get_rng_state(), state)
    assert set(calls) == {XPU}


@pytest.mark.parametrize(
    ("names", "found"), [((), False), (("get_rng_state",), False), (("get_rng_state", "set_rng_state"), True)]
)
def test_both_functions_are_needed(names, found, monkeypatch):
    monkeypatch.setattr(_device_generator, "has_streams", lambda device: True)
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(**dict.fromkeys(names)))
    assert (module_of(XPU) is not None) == found
    with nullcontext() if found else pytest.raises(RuntimeError, match=r"torch\.xpu has no get_rng_state"):
        expect_rewindable(XPU)
