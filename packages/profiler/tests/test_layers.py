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
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


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


def test_submodules_by_their_names():
    names = ["embed", "blocks.0", "blocks.1", "head"]
    found = profile(Encoder(), ROWS, layers=names, device="cpu", timeout=1e-6)
    assert found.names == names
    assert [layer.kind for layer in found] == ["Linear", "Sequential", "Sequential", "Linear"]


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


@pytest.mark.parametrize(
    ("layers", "kind", "match"),
    [
        (["embed", "tail"], ValueError, "layers: module has no submodule 'tail'; its children are embed, blocks, head"),
        ("embed", TypeError, r"layers: expected a list of names, got a str; write layers=\['embed'\]"),
        (["embed", "embed"], ValueError, "layers: expected each name once"),
        ([], ValueError, "module: expected at least one layer"),
        (None, TypeError, r"wrap the layers in one, or name those that run one after the other: layers=\[...\]"),
    ],
)
def test_other_names(layers, kind, match):
    with pytest.raises(kind, match=match):
        profile(Encoder(), ROWS, layers=layers, device="cpu")
