"""Identical layers are counted only once on fake tensors, with the same figures."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from profiler import _count, profile
from profiler._count import count_key

from .strategies import WIDTH, fewer, models, samples


def counted(model: nn.Module, sample: torch.Tensor, *, each: bool):
    with patch.object(_count, "count_key", lambda *_: None) if each else patch.object(_count, "count_key", count_key):
        return profile(model, sample, device="meta", split_backward=True)


@fewer
@given(st.lists(models(max_size=3), min_size=1, max_size=2), st.lists(st.integers(0, 1), max_size=5), samples())
def test_figures_are_those_of_counting_each(stacks, order, sample):
    layers = [layer for k in [0, *order] for layer in stacks[k % len(stacks)]]
    model = nn.Sequential(*layers)
    assert counted(model, sample, each=False) == counted(model, sample, each=True)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, *, config: object = None, scale: float = 1.0, tied: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.config, self.options = config, {"scale": scale, "widths": [width]}
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        type(self).calls += 1
        return x + self.second(self.first(x).tanh()) * self.options["scale"]


def calls(*blocks: nn.Module) -> int:
    Block.calls = 0
    profile(nn.Sequential(*blocks), torch.rand(4, WIDTH, requires_grad=True), device="meta")
    return Block.calls


def hooked(block: nn.Module) -> nn.Module:
    block.first.register_forward_hook(lambda *_: None)
    return block


class Other(Block):
    pass


def test_deep_model_costs_one_block():
    shared = object()
    assert calls(*(Block(config=shared) for _ in range(20))) == 1


@pytest.mark.parametrize(
    "other",
    [
        Other(),
        Block(config=object()),
        Block(scale=2.0),
        Block(tied=True),
        hooked(Block()),
        Block().requires_grad_(False),
        nn.Sequential(Block()),
        Block().eval(),
    ],
    ids=["class", "object", "attribute", "tied", "hook", "frozen", "nested", "mode"],
)
def test_whatever_may_matter_is_counted_apart(other):
    Other.calls = 0
    ahead = nn.Linear(WIDTH, WIDTH)
    assert calls(ahead, Block(), Block(), Block()) == 1
    assert calls(ahead, Block(), other, Block()) + Other.calls == 2
