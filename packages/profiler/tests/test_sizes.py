import pytest
import torch
from torch import nn

from profiler import profile_sizes

from .strategies import WIDTH

ROW = 4 * WIDTH


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("layer", "latent"),
    [
        (nn.Linear(WIDTH, 10), 4 * 10),  # the output; input and weight are not its own
        (nn.Identity(), 0),
        (nn.Flatten(), 0),  # a view
        (nn.ReLU(), ROW),  # saves its output, counted once
        (nn.ReLU(inplace=True), 0),
        (nn.Dropout(0.5), 2 * ROW),  # the output, and a mask: floats on the CPU, where CUDA takes bytes
        (nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh()), 4 * 10),  # tanh needs what it gives, not what it got
        (nn.Sequential(nn.Linear(WIDTH, 10), nn.GELU()), 2 * 4 * 10),  # gelu needs what it got
    ],
    ids=str,
)
def test_saved_bytes_counted_by_hand(layer, latent, device):
    sample = torch.rand(8, WIDTH, requires_grad=True)
    assert profile_sizes(nn.Sequential(layer), sample, 1, 0, device) == [8 * latent]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_first_micro_batch_has_the_most_rows(device):
    assert profile_sizes(nn.Sequential(nn.ReLU()), torch.rand(8, WIDTH), 3, 0, device) == [3 * ROW]


def test_a_parameter_counts_so_many_times():
    linear = nn.Sequential(nn.Linear(WIDTH, 10))
    assert profile_sizes(linear, torch.rand(8, WIDTH), 1, 2.5, "cpu") == [8 * 4 * 10 + int(2.5 * 4 * 10 * (WIDTH + 1))]
