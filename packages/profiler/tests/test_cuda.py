import pytest
import torch
from torch import nn

from profiler import profile

from .strategies import Call

pytestmark = pytest.mark.cuda
BLOCK = 512  # the allocator hands out multiples of this


def test_the_allocator_agrees_up_to_its_blocks():
    x = torch.rand(64, 100, requires_grad=True)
    for layer in (nn.Dropout(), nn.LayerNorm(100), nn.GELU()):
        (found,) = profile(nn.Sequential(layer), x, device="cuda", timeout=0.05)
        here, there = x.detach().cuda().requires_grad_(), layer.cuda()
        before = torch.cuda.memory_allocated()
        output = there(here)
        # No layer here keeps more than three storages.
        assert 0 <= torch.cuda.memory_allocated() - before - found.saved_bytes < 3 * BLOCK
        del output


def slow(x):
    torch.cuda._sleep(5_000_000)
    return x * 1


def test_seconds_are_measured_on_current_stream():
    """The default stream is idle, so events on it would be close together."""
    with torch.cuda.stream(torch.cuda.Stream()):
        (seconds,) = profile(
            nn.Sequential(Call(slow)), torch.rand(4, requires_grad=True), device="cuda", timeout=0.05
        ).seconds
    assert seconds > 1e-3
