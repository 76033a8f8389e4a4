import re

import pytest
import torch
from torch import nn

from profiler import profile, profile_seconds, profile_sizes, profile_times

ROWS = torch.rand(4, 3)


def linear():
    return nn.Sequential(nn.Linear(3, 3))


WAYS = {
    "times": lambda module, sample=ROWS, device="cpu": profile_times(module, sample, 1e-6, device),
    "sizes": lambda module, sample=ROWS, device="cpu": profile_sizes(module, sample, 1, 2.0, device),
    "profile": lambda module, sample=ROWS, device="cpu": profile(module, sample, device=device, timeout=1e-6),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((nn.Linear(3, 3),), TypeError, r"module: expected nn\.Sequential, got"),
        ((nn.ModuleList([nn.Linear(3, 3)]),), TypeError, r"module: expected nn\.Sequential, got"),
        ((nn.Sequential(),), ValueError, "expected at least one layer"),
        ((nn.Sequential(nn.ReLU(), nn.LazyLinear(3)),), ValueError, r"'1\.weight' is lazy"),
        ((linear(), "rows"), TypeError, "sample|tensor"),
        ((linear(), {"x": [ROWS, 1.5]}), TypeError, "sample|tensor|value"),
        ((linear(), torch.tensor(1.0)), (TypeError, ValueError), "sample|tensor|rows|dim"),
        ((linear(), ()), (TypeError, ValueError), "sample|tensor|rows|dim"),
        ((linear(), ROWS, "cuda:99"), ValueError, "device is cuda:99, but torch sees"),
        ((linear(), ROWS, "xpu"), ValueError, "device: .*'xpu'; use device='cpu'"),
    ],
)
def test_what_cannot_be_profiled_is_named(way, arguments, error, message):
    with pytest.raises(error, match=message):
        WAYS[way](*arguments)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: profile_times(linear(), ROWS, 1, "meta"), ValueError, "accelerator of this machine, got 'meta'"),
        (lambda: profile_seconds(linear(), ROWS, timeout="1", device="cpu"), TypeError, "timeout: expected a number"),
        (lambda: profile_times(linear(), ROWS, 0, "cpu"), ValueError, "timeout: expected a finite number > 0"),
        (
            lambda: profile(linear(), ROWS, device="cpu", timeout=float("nan")),
            ValueError,
            "timeout: expected a finite number > 0",
        ),
        (lambda: profile(linear(), ROWS, device="cpu", chunks=0), ValueError, "chunks is 0; expected at least 1"),
        (lambda: profile_sizes(linear(), ROWS, 2.5, 2.0, "cpu"), TypeError, "chunks is 2.5; expected an integer"),
        (lambda: profile_sizes(linear(), ROWS, 1, -1, "cpu"), ValueError, "param_scale: expected a finite number >= 0"),
    ],
)
def test_what_is_no_such_number_is_named(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_profile_refuses_gradients():
    model = linear()
    model(ROWS).sum().backward()
    with pytest.raises(ValueError, match=r"some parameter already has gradient \('0\.weight'\)"):
        profile(model, ROWS, device="cpu")


def test_the_default_is_the_accelerator_or_the_cpu():
    here = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    assert torch.device(profile(linear(), ROWS, timeout=1e-6).device).type == here.type
