"""The split of a model's forward at modules, into a number of stages."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import BalanceError, GPipe
from gpipe.model._blocks import candidates, count_block_bytes, divide, find_named_blocks, unevenness

from .forwards import Told, models


def sized(*widths: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for width in widths)


class Listed(nn.Module):
    """A model with lists."""

    def __init__(self, **lists: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2)
        for name, each in lists.items():
            self.add_module(name, each)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


@given(models(least=2), st.integers(1, 6))
def test_blocks_and_stages_are_disjoint(told: Told, stages: int) -> None:
    model = told.model()
    blocks, balance, _ = divide(model, stages)
    inside = [each for block in blocks.values() for each in block.modules()]
    assert len(inside) == len({*inside})
    assert sum(balance) == len(blocks)
    assert len(balance) == min(stages, len(blocks))
    assert min(balance) > 0
    assert [*blocks] == [name for name, each in model.named_modules() if blocks.get(name) is each]


@given(st.lists(st.integers(1, 30), min_size=2, max_size=12), st.integers(1, 5))
def test_largest_stage_is_minimal(widths: list[int], stages: int) -> None:
    model = nn.ModuleDict({"layers": sized(*widths)})
    found = divide(model, stages)
    sizes = count_block_bytes(model, found.blocks)
    best = min(unevenness(sizes, cut) for cut in cuts(len(found.blocks), len(found.balance)))
    assert unevenness(sizes, found.balance) == pytest.approx(best)


class Adapted(nn.Module):
    """A linear layer with named adapters; a forward uses any subset of them."""

    def __init__(self, width: int, adapters: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.adapters = nn.ModuleDict({f"a{k}": nn.Linear(width, width) for k in range(adapters)})


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 3)), min_size=2, max_size=5), st.integers(1, 6))
def test_adapters_inside_of_a_layer_are_no_blocks(layers: list[tuple[int, int]], stages: int) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Adapted(*each) for each in layers)})
    assert not any("adapters" in name for name in divide(model, stages).blocks)


def cuts(blocks: int, stages: int) -> list[list[int]]:
    if stages == 1:
        return [[blocks]]
    return [[first, *rest] for first in range(1, blocks - stages + 2) for rest in cuts(blocks - first, stages - 1)]


@pytest.mark.parametrize(
    ("lists", "stages", "expected"),
    [
        ({"layers": sized(2, 2)}, 2, ["layers.0", "layers.1"]),
        ({"encoder": sized(2, 2), "decoder": sized(2, 2)}, 2, ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]),
        ({"layers": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})}, 2, ["layers.a", "layers.b"]),
        ({"layers": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))}, 2, ["layers.0", "layers.2"]),
        ({"groups": nn.ModuleList([sized(2, 2), sized(2)])}, 3, ["groups.0.0", "groups.0.1", "groups.1.0"]),
        ({"layers": nn.ModuleList([nn.Sequential(*sized(9, 9)), *sized(2)])}, 2,
         ["layers.0.0", "layers.0.1", "layers.1"]),
        ({"trunk": nn.ModuleDict({"inner": sized(2, 2)})}, 2, ["trunk.inner.0", "trunk.inner.1"]),
        ({"layers": sized(2)}, 3, ["embed", "layers.0", "head"]),
        ({}, 2, ["embed", "head"]),
        ({"layers": sized(2, 2)}, 9, ["layers.0", "layers.1"]),
    ],
)  # fmt: skip
def test_blocks_are_the_elements_of_lists(lists: dict[str, nn.Module], stages: int, expected: list[str]) -> None:
    assert [*divide(Listed(**lists), stages).blocks] == expected


@given(models(least=2), st.integers(1, 6), st.data())
def test_division_by_costs_is_nearly_optimal(told: Told, stages: int, data: st.DataObject) -> None:
    model = told.model()
    known = {name: data.draw(st.floats(0.1, 9)) for name in candidates(model)}

    def costs(blocks: dict[str, nn.Module]) -> list[float]:
        return [known[name] for name in blocks]

    blocks, balance, _ = divide(model, stages, costs=costs)
    assert blocks.keys() <= known.keys()
    if len(blocks) >= stages:
        best = min(unevenness(costs(blocks), cut) for cut in cuts(len(blocks), stages))
        assert unevenness(costs(blocks), balance) == pytest.approx(best)


def test_the_block_that_takes_longest_is_divided() -> None:
    layers = nn.ModuleList([nn.Sequential(*sized(2, 2)), *sized(2)])
    costs = {"layers.0": 9.0, "layers.0.0": 5.0, "layers.0.1": 4.0, "layers.1": 5.0}
    found = divide(Listed(layers=layers), 3, costs=lambda blocks: [costs[name] for name in blocks])
    assert [*found.blocks] == ["layers.0.0", "layers.0.1", "layers.1"]


def test_block_used_several_times_is_one_block() -> None:
    layer = nn.Linear(2, 2)
    assert [*divide(Listed(layers=nn.ModuleList([layer, nn.Linear(2, 2), layer])), 2).blocks] == [
        "layers.0",
        "layers.1",
    ]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["layers"], ["layers.0", "layers.1"]),
        (["head", "layers.1"], ["head", "layers.1"]),
        (["layers", "layers.0"], ["layers.0", "layers.1"]),
    ],
)
def test_blocks_may_be_named(names: list[str], expected: list[str]) -> None:
    assert [*find_named_blocks(Listed(layers=sized(2, 2)), names)] == expected


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["layer"], "blocks names 'layer', but Listed has no module of this name"),
        ([""], "blocks names '', but Listed has no module of this name"),
        ([], "blocks=[] names no module of Listed"),
        (["layers.0", "layers.0.head"], "blocks names 'layers.0.head' and 'layers.0', which contains it"),
    ],
)
def test_names_that_do_not_fit_are_refused(names: list[str], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        GPipe(Listed(layers=nn.ModuleList([Listed()])), devices=["cpu"], blocks=names)


@pytest.mark.parametrize("names", [3, [3], [None]])
def test_what_is_no_name_is_refused(names: Any) -> None:
    with pytest.raises(TypeError, match="blocks must be a name of a module, or a list of names; got"):
        GPipe(Listed(layers=sized(2, 2)), devices=["cpu"], blocks=names)


@pytest.mark.parametrize(
    ("balance", "devices", "error"),
    [
        ([1, 1], ["cpu"] * 2, BalanceError),
        ([0, 3], ["cpu"] * 2, BalanceError),
        ("abc", ["cpu"] * 2, TypeError),
        ([1, 2], ["cpu"], IndexError),
    ],
)
def test_a_balance_that_does_not_fit_is_refused(balance: Any, devices: list[str], error: type[Exception]) -> None:
    with pytest.raises(error):
        GPipe(Listed(layers=sized(2, 2, 2)), balance, devices=devices)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="Listed has no modules with parameters at which its forward can be cut"):
        GPipe(without_parameters(), devices=["cpu"])


def without_parameters() -> nn.Module:
    model = Listed()
    model.embed, model.head = nn.ReLU(), nn.ReLU()
    return model


@pytest.mark.parametrize("devices", [1, 2, 4, 9])
def test_number_of_stages_is_limited_by_blocks(devices: int) -> None:
    pipe = GPipe(Listed(layers=sized(2, 2, 2, 2)), devices=["cpu"] * devices)
    assert len(pipe.balance) == len(pipe.devices) == min(devices, 4)
    assert pipe(torch.zeros(3, 2)).shape == (3, 2)
