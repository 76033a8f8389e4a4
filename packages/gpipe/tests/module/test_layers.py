"""A pipe and its partitions hold the same layers, which are fixed once it is created."""

import copy
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from gpipe import GPipe

from ..layers import DOUBLE, assert_trains_like, linears, piped, rows

REFUSED: dict[str, Callable[[GPipe], Any]] = {
    "by its index": lambda pipe: pipe.__setitem__(1, nn.Tanh()),
    "by its name": lambda pipe: setattr(pipe, "1", nn.Tanh()),
    "none": lambda pipe: setattr(pipe, "1", None),
}
PAST: dict[str, Callable[[GPipe], Any]] = {
    "a layer more": lambda pipe: setattr(pipe, "new", nn.Tanh()),
    "another one, by add_module": lambda pipe: pipe._modules.__setitem__("1", nn.Tanh()),
    "deleted": lambda pipe: delattr(pipe, "1"),
    "partition, a layer more": lambda pipe: pipe.partitions[1].append(nn.Tanh()),
    "partition, another one": lambda pipe: pipe.partitions[1].__setitem__(0, nn.Tanh()),
    "from one partition to another": lambda pipe: setattr(pipe.partitions[0], "1", pipe.partitions[1].pop(0)),
    "partitions, another one": lambda pipe: pipe.partitions.__setitem__(0, linears()),
}
"""Ways to change the layers of a pipe or of its partitions."""


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_cannot_be_replaced(name: str) -> None:
    pipe = piped(linears(), [1, 2], chunks=2)
    with pytest.raises(TypeError, match=r"cannot be replaced; build a new pipe, .*GPipe\(pipe\[:\]"):
        REFUSED[name](pipe)
    assert_trains_like(pipe, linears())


@pytest.mark.parametrize("name", PAST)
@pytest.mark.parametrize("run", [lambda pipe: pipe(rows()), lambda pipe: pipe.step(rows(), loss_fn=torch.sum)])
def test_changed_layers_raise_before_running(name: str, run: Any) -> None:
    pipe, called = piped(linears(), [1, 2], chunks=2), []
    for each in pipe:
        each.register_forward_hook(lambda *_: called.append(None))
    PAST[name](pipe)
    with pytest.raises(RuntimeError, match=r"build a new pipe, .*GPipe\(pipe\[:\]"):
        run(pipe)
    assert not called


def test_new_pipe_of_layers_keeps_optimizer() -> None:
    model = linears(5)
    before, plain = piped(model, [1, 4], chunks=2), copy.deepcopy(model)
    adam = [torch.optim.Adam(each.parameters(), 0.1) for each in (before, plain)]
    for pipe in (before, GPipe(before[:], [3, 2], devices=["cpu"] * 2, chunks=2), copy.copy(before)):
        assert_trains_like(pipe, plain)
        for each in adam:
            each.step()
            each.zero_grad()
    torch.testing.assert_close(pipe.state_dict(), plain.state_dict())


def test_parameter_of_pipe_is_trained_and_saved() -> None:
    """Such as the weights of several losses."""
    pipe, model = piped(linears(), [1, 2], chunks=2), linears()
    for each in (pipe, model):
        each.scale = nn.Parameter(torch.full((1,), 2.0, dtype=DOUBLE))
        each.register_buffer("seen", torch.zeros(1))
        (each(rows()).square().sum() * each.scale).backward()
    assert list(pipe.state_dict()) == list(model.state_dict())
    grads = [{n: p.grad for n, p in each.named_parameters()} for each in (pipe, model)]
    torch.testing.assert_close(*grads)
    assert [name for name, _ in pipe.named_children()] == ["0", "1", "2"]


@pytest.fixture
def replaces_parameters() -> Iterator[None]:
    """A module that is moved, or changes its dtype, gets new parameters, as on some device types."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.usefixtures("replaces_parameters")
def test_parameters_keep_their_identity() -> None:
    """They stay tied and keep their gradients, and an existing optimizer trains them."""
    model = linears(3)
    model[2].weight = model[0].weight
    model(rows()).sum().backward()
    before = dict(model.named_parameters(remove_duplicate=False))
    gradients = {name: parameter.grad.clone() for name, parameter in before.items()}
    with closing(GPipe(model, [1, 1, 1], devices=["cpu"] * 3)) as pipe:
        pipe.float()
        now = dict(pipe.named_parameters(remove_duplicate=False))
        assert now.keys() == before.keys()
        assert all(now[name] is before[name] for name in before)
        assert {parameter.dtype for parameter in now.values()} == {torch.float32}
        for name, parameter in now.items():
            torch.testing.assert_close(parameter.grad, gradients[name].float())
