"""Residual blocks and nested containers: cut anywhere, they compute what they compute as modules."""

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe
from gpipe.nn import Residual, flatten_nested

from ..layers import Layer, gradients, running, trained
from ..schedules import balances

WIDTH, ROWS = 3, 6


def weighed() -> nn.Module:
    """A join with a parameter."""
    return Layer(lambda s, y, x: y.tanh() + s.weight * x, weight=nn.Parameter(torch.tensor(0.5)))


class Own(nn.Sequential):
    """Computes more than its layers do."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


LEAVES = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "tanh": nn.Tanh,
    "own": lambda: Own(nn.Linear(WIDTH, WIDTH)),
}
leaves = st.sampled_from(list(LEAVES)).map(lambda kind: (kind,))
SHORTCUTS = {"none": lambda: None, "linear": lambda: nn.Linear(WIDTH, WIDTH)}
JOINS = {"sum": dict, "product": lambda: {"join": torch.mul}, "module": lambda: {"join": weighed()}}


def containers(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    rows = st.lists(parts, max_size=3).map(tuple)
    rests = st.tuples(st.just("residual"), rows, st.sampled_from(list(SHORTCUTS)), st.sampled_from(list(JOINS)))
    return st.tuples(st.just("row"), rows) | rests


recipes = st.lists(st.recursive(leaves, containers, max_leaves=8), min_size=1, max_size=4)


def build(recipe: Any) -> nn.Module:
    kind, *rest = recipe
    if kind in LEAVES:
        return LEAVES[kind]()
    layers = map(build, rest[0])
    if kind == "row":
        return nn.Sequential(*layers)
    return Residual(*layers, shortcut=SHORTCUTS[rest[1]](), **JOINS[rest[2]]())


def model_of(recipe: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*map(build, recipe)).double()


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


ways = st.sampled_from([None, "fill_drain", "1f1b", "zero_bubble"])
"""Schedules of a step; None is a forward, and a backward after it."""


@given(recipes, st.data(), st.sampled_from(["always", "never"]), ways, st.booleans())
def test_a_flat_model_trains_as_the_nested_one(
    recipe: Any, data: st.DataObject, mode: str, way: str | None, inline: bool
) -> None:
    model = model_of(recipe)
    plain, flat = copy.deepcopy(model), flatten_nested(model)
    if not len(flat):
        return
    balance = data.draw(balances(len(flat), 6))
    pipe = GPipe(flat, balance, devices=["cpu"] * len(balance), chunks=3, checkpoint=mode)
    x, y = batch().requires_grad_(), batch().requires_grad_()
    with running(inline):
        torch.testing.assert_close(trained(pipe, x, way), trained(plain, y))
    torch.testing.assert_close({"input": x.grad, **gradients(model)}, {"input": y.grad, **gradients(plain)})
    pipe.close()


@given(recipes)
def test_state_dicts_have_names_of_nested_model(recipe: Any) -> None:
    model = model_of(recipe)
    flat = flatten_nested(model)
    each = [flat, GPipe(flat, [len(flat)], devices=["cpu"])] if len(flat) else [flat]
    for k, one in enumerate(each):
        assert list(one.state_dict()) == list(model.state_dict())
        fresh = {name: tensor + k + 1 for name, tensor in model.state_dict().items()}
        one.load_state_dict(fresh)
        torch.testing.assert_close(dict(model.state_dict()), fresh)


def test_layers_keep_their_mode() -> None:
    model = nn.Sequential(nn.Sequential(nn.Dropout(), nn.Tanh()), Residual(nn.Tanh()))
    model[0][0].eval()
    flat = flatten_nested(model)
    assert [layer.training for layer in flat] == [False, True, True, True, True]
    assert not flatten_nested(model.eval()).training
    assert not any(module.training for module in flatten_nested(model).modules())


def test_modules_with_own_behavior_stay_one_layer() -> None:
    hooked = nn.Sequential(nn.Tanh(), nn.Tanh())
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    model = nn.Sequential(Own(nn.Tanh(), nn.Tanh()), nn.Sequential(hooked, nn.Tanh()))
    flat = flatten_nested(model)
    assert [name for name, _ in flat.named_children()] == ["0", "1_0", "1_1"]
    torch.testing.assert_close(flat(batch()), model(batch()))


def test_titles_that_would_be_the_same() -> None:
    parts = OrderedDict(a=nn.Sequential(OrderedDict(b=nn.Linear(2, 2))), a_b=nn.Linear(2, 2))
    flat = flatten_nested(nn.Sequential(parts))
    assert [name for name, _ in flat.named_children()] == ["a_b_", "a_b"]
    assert list(flat.state_dict()) == ["a.b.weight", "a.b.bias", "a_b.weight", "a_b.bias"]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_repeated_flattening_are_equivalent(again: Any) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Residual(nn.Linear(WIDTH, WIDTH), nn.Tanh())).double()
    once = flatten_nested(model)
    twice = flatten_nested(once)
    assert list(twice) == list(once)
    assert list(twice.state_dict()) == list(model.state_dict())
    for each in (model, once, twice, GPipe(twice, [3, 2], devices=["cpu"] * 2)):
        torch.testing.assert_close(again(each)(batch()), model(batch()))


@pytest.mark.parametrize("name", ["shortcut", "join"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"no layer of a Residual may be called '{name}'; pass it as {name}="):
        Residual(OrderedDict({name: nn.Tanh()}))


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Own(nn.Tanh())])
def test_what_is_no_row_of_layers_is_refused(model: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        flatten_nested(model)
