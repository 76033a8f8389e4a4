"""Which layers are profiled, whatever holds them."""

import pytest
import torch
from torch import nn

from profiler import profile, profile_seconds, profile_sizes, profile_times

ROWS = torch.rand(4, 6)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.embed(x))


class Chain(nn.Module):
    """Like a pipe: computes its children one after the other, and iterates over them."""

    def __init__(self, *layers):
        super().__init__()
        for i, layer in enumerate(layers):
            self.add_module(str(i), layer)

    def __iter__(self):
        return iter(self.children())

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def test_what_iterates_over_its_layers_is_as_good_as_a_sequential():
    layers = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
    found = profile(Chain(*layers), ROWS, device="meta")
    assert found == profile(nn.Sequential(*layers), ROWS, device="meta")
    assert profile_sizes(Chain(*layers), ROWS, 2, 2.0, "cpu") == profile_sizes(
        nn.Sequential(*layers), ROWS, 2, 2.0, "cpu"
    )
    assert (
        len(profile_times(Chain(*layers), ROWS, 1e-6, "cpu"))
        == len(profile_seconds(Chain(*layers), ROWS, timeout=1e-6))
        == 3
    )


def test_what_is_no_chain_of_layers_is_refused():
    with pytest.raises(TypeError, match=r"module: expected nn\.Sequential, got Encoder; wrap the layers in one"):
        profile(Encoder(), ROWS, device="cpu")
    with pytest.raises(ValueError, match="module: expected at least one layer"):
        profile(nn.Sequential(), ROWS, device="cpu")
