"""Which layers are profiled, whatever holds them."""

import torch
from torch import nn

from profiler import profile

ROWS = torch.rand(4, 6)


class Chain(nn.ModuleList):
    """Like a pipe: computes its children one after the other, and iterates over them."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


def test_what_iterates_over_its_layers_is_as_good_as_a_sequential():
    layers = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)
    found = profile(Chain(layers), ROWS, device="meta")
    assert found == profile(nn.Sequential(*layers), ROWS, device="meta")
