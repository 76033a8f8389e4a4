"""Profiles on an accelerator that is not CUDA: seconds by its events, bytes as everywhere, random numbers put back."""

import pytest
import torch
from torch import nn

from profiler import profile, profile_seconds, profile_sizes, profile_times
from streams import use_stream

from .accelerator import DEVICES, device, library, new_stream

x = torch.rand(8, 4)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.ReLU(inplace=True))


@pytest.mark.parametrize("k", range(DEVICES))
def test_profile_has_seconds_and_bytes_of_cpu(k: int):
    library()
    here, cpu = (profile(model(), x, device=where, timeout=0.01) for where in (device(k), "cpu"))
    assert min(here.seconds) > 0
    for name in ("parameter_bytes", "saved_bytes", "output_bytes", "flops"):
        assert [getattr(layer, name) for layer in here] == [getattr(layer, name) for layer in cpu], name


def test_it_is_the_default_device():
    library()
    assert len(profile_seconds(model(), x, timeout=0.01)) == 3
    assert min(profile_times(model(), x, 0.01, None)) >= 0
    assert profile_sizes(model(), x, 2, 2.0, None) == profile_sizes(model(), x, 2, 2.0, "cpu")


def test_seconds_are_measured_on_current_stream():
    library()
    with use_stream(new_stream(1)):
        assert min(profile_seconds(model(), x, device=device(1), timeout=0.01)) > 0


def test_random_numbers_are_put_back():
    library()
    module = torch.get_device_module(device(0).type)
    before = module.get_rng_state(device(2)), torch.get_rng_state()
    profile(nn.Sequential(nn.Dropout()), x, device=device(2), timeout=0.01)
    assert before[0].equal(module.get_rng_state(device(2)))
    assert before[1].equal(torch.get_rng_state())
