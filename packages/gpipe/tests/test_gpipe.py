"""A pipe looks like the module that it wraps to all code that inspects modules."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import nn

from gpipe import GPipe

from .layers import DOUBLE, assert_trains_like, linears, piped, rows
from .schedules import balances

CPU = torch.device("cpu")


def deep() -> nn.Sequential:
    """A model with names, nested layers, buffers, and a layer without parameters."""
    return nn.Sequential(
        OrderedDict(
            stem=nn.Linear(3, 3),
            norm=nn.BatchNorm1d(3),
            body=nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3, bias=False))),
            act=nn.ReLU(),
            head=nn.Linear(3, 3),
        )
    ).to(DOUBLE)


@given(balances(5))
def test_names_and_order_match_model(balance: list[int]) -> None:
    model = deep()
    pipe = piped(model, balance)
    state, pipe_state = model.state_dict(), pipe.state_dict()
    assert list(pipe_state) == list(state)
    assert all(torch.equal(pipe_state[key], state[key]) for key in state)
    assert pipe_state._metadata == state._metadata
    for listing in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        names = [name for name, _ in getattr(pipe, listing)()]
        assert names == [name for name, _ in getattr(model, listing)()]


@given(balances(5))
def test_a_checkpoint_of_torchgpipe_loads(balance: list[int]) -> None:
    source, target = deep(), piped(deep(), balance)
    view = piped(source, balance).partitions
    old = {f"partitions.{key}": value for key, value in view.state_dict().items()}
    assert not old.keys() & target.state_dict().keys()
    keys = list(old)
    assert str(target.load_state_dict(old)) == "<All keys matched successfully>"
    assert list(old) == keys
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


def test_what_is_missing_or_unknown_is_still_told() -> None:
    pipe = piped(linears(2), [1, 1])
    state = {f"partitions.0.{key}": value for key, value in linears(1).state_dict().items()} | {"other": rows()}
    told = pipe.load_state_dict(state, strict=False)
    assert (told.missing_keys, told.unexpected_keys) == (["1.weight", "1.bias"], ["other"])
    with pytest.raises(RuntimeError, match=r"1\.weight"):
        pipe.load_state_dict(state)


@pytest.mark.parametrize("name", ["chunks", "partitions", "balance", "devices", "checkpoint", "_workers", "_stages"])
def test_child_may_shadow_attribute_name(name: str) -> None:
    model = nn.Sequential(OrderedDict([(name, nn.Linear(3, 3, dtype=DOUBLE)), ("1", nn.Linear(3, 3, dtype=DOUBLE))]))
    pipe = piped(model, [1, 1], chunks=2)
    assert (pipe.chunks, pipe.balance, pipe.devices) == (2, [1, 1], [CPU, CPU])
    assert len(pipe.partitions) == 2
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert_trains_like(pipe, model)
    assert_trains_like(copy.deepcopy(pipe), model)


@given(balances(5))
def test_length_iteration_and_index_are_the_models(balance: list[int]) -> None:
    model = deep()
    pipe = GPipe(model, balance, devices=["cpu"] * len(balance))
    assert len(pipe) == 5
    assert list(pipe) == list(model)
    assert [pipe[k] for k in range(-5, 5)] == [model[k] for k in range(-5, 5)]


@pytest.mark.parametrize("cut", [slice(1, 3), slice(None, None, 2), slice(-2, None), slice(0, 0)])
def test_slice_is_sequential_of_same_layers(cut: slice) -> None:
    model = deep()
    part = GPipe(model, [2, 3], devices=["cpu"] * 2)[cut]
    assert isinstance(part, nn.Sequential)
    assert list(part.named_children()) == list(model[cut].named_children())


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.cuda(),
        lambda pipe: pipe.cuda(0),
        lambda pipe: pipe.cpu(),
        lambda pipe: pipe.to("cpu"),
        lambda pipe: pipe.to(CPU, torch.float32),
        lambda pipe: pipe.to(device="cuda"),
        lambda pipe: pipe.to(torch.zeros(1)),
        lambda pipe: pipe.to_empty(device="cpu"),
    ],
)
def test_a_move_is_denied(move: Callable[[GPipe], Any]) -> None:
    pipe = piped(deep(), [2, 3])
    before = copy.deepcopy(pipe.state_dict())
    with pytest.raises(TypeError, match=r"denied to move parameters and buffers.*devices="):
        move(pipe)
    assert all(torch.equal(value, before[key]) for key, value in pipe.state_dict().items())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))])
@pytest.mark.parametrize("used", [False, True])
def test_a_copy_computes_alike_and_on_its_own(copied: Callable[[GPipe], GPipe], used: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).to(DOUBLE)
    pipe = piped(model, [1, 2], chunks=2, checkpoint="always")
    if used:
        assert_trains_like(pipe, model)
    twin = copied(pipe)
    before = [parameter.grad for parameter in pipe.parameters()]
    assert all(a is not b and torch.equal(a, b) for a, b in zip(pipe.parameters(), twin.parameters(), strict=True))
    assert_trains_like(twin, model)
    assert [parameter.grad for parameter in pipe.parameters()] == before
    assert repr(twin) == repr(pipe)


def test_no_layers_are_the_identity() -> None:
    pipe = GPipe(nn.Sequential(), [], devices=["cpu"])
    x = rows()
    assert pipe(x) is x
    assert (len(pipe), pipe.devices, list(pipe.state_dict())) == (0, [], [])
