import pytest
import torch
from torch import nn

from profiler import profile, profile_sizes, profile_times

pytestmark = pytest.mark.cuda
BLOCK = 512  # the allocator hands out multiples of this


def model():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(inplace=True), nn.Dropout(), nn.Flatten(), nn.Linear(16 * 36, 10))


def sample():
    return torch.rand(64, 3, 8, 8)


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


def test_dropout_keeps_a_byte_for_each_element():
    rows, width = 64, 1024
    sizes = profile_sizes(nn.Sequential(nn.Dropout()), torch.rand(rows, width, requires_grad=True), 1, 0, "cuda")
    assert sizes == [rows * width * (4 + 1)]


def test_backward_operations_are_seen_too():
    found = profile(nn.Sequential(nn.Linear(64, 64)), torch.rand(32, 64), device="cuda", timeout=0.05)
    assert found[0].flops == 2 * 2 * 32 * 64 * 64
    assert found[0].peak_bytes >= found[0].saved_bytes + found[0].trainable_bytes


def test_times_and_sizes_of_a_model_on_the_host():
    host, x = model(), sample()
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    assert min(profile_times(host, x, 0.05, "cuda")) > 0
    assert len(profile_sizes(host, x, 4, 2.0, torch.device("cuda", 0))) == len(host)
    assert all(parameter.device.type == "cpu" for parameter in host.parameters())
    assert torch.equal(before[0], torch.cuda.get_rng_state())
    assert torch.equal(before[1], torch.get_rng_state())


def test_works_on_the_current_stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = profile(model(), sample(), device="cuda", timeout=0.05)
        assert torch.cuda.current_stream() == stream
    assert min(found.seconds) > 0


class Slow(nn.Module):
    def forward(self, x):
        torch.cuda._sleep(5_000_000)
        return x * 1


def test_seconds_are_those_of_the_current_stream():
    """On the default stream no time passes: events there would be close together."""
    with torch.cuda.stream(torch.cuda.Stream()):
        (seconds,) = profile(
            nn.Sequential(Slow()), torch.rand(4, requires_grad=True), device="cuda", timeout=0.05
        ).seconds
    assert seconds > 1e-3


def test_no_device_by_that_number():
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"has only {count} CUDA device"):
        profile(model(), sample(), device=f"cuda:{count}")
