"""The parameters of layers are those that torch finds, in its order."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe.engine._parameters import parameters_of


@given(st.data(), st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=6))
def test_they_are_those_of_torch_in_its_order(data: Any, owned: list[list[int]]):
    """Also if modules share parameters, or are in several places, or have a place for what is not there."""
    pool = [nn.Parameter(torch.zeros(1)) for _ in range(10)]
    modules: list[nn.Module] = []
    for numbers in owned:
        module = nn.Module()
        for k, number in enumerate(numbers):
            module.register_parameter(f"p{k}", pool[number])
        module.register_parameter("none", None)
        module.register_module("nothing", None)
        if modules:
            for k, child in enumerate(data.draw(st.lists(st.sampled_from(modules), max_size=3))):
                module.add_module(f"c{k}", child)
        modules.append(module)
    assert [*map(id, parameters_of(modules[-1]))] == [*map(id, modules[-1].parameters())]
