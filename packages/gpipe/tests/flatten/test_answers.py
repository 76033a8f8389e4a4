"""What a pipe does not have itself, the model that it was made of answers."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import Layer


class Model(nn.Module):
    tags = ("small",)
    _hidden = 1

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 2}
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    @property
    def width(self) -> int:
        return self.config["width"]

    def sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self.parameters()]

    def generate(self, hidden: Tensor) -> Tensor:
        return self(hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_attributes_properties_and_methods() -> None:
    model = Model()
    pipe = GPipe(model, devices=["cpu"] * 2, sample=torch.zeros(1, 2))
    assert (pipe.config, pipe.tags, pipe.width, pipe.sizes()) == (model.config, ("small",), 2, model.sizes())
    assert pipe.config is model.config
    assert pipe.chunks == 1  # its own come first
    for name in ("_hidden", "nothing"):
        with pytest.raises(AttributeError, match=f"GPipe.*{name}"):
            getattr(pipe, name)
    torch.testing.assert_close(pipe.generate(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_a_sequential_model_answers_nothing() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"])
    with pytest.raises(AttributeError, match="append"):
        pipe.append(nn.Linear(2, 2))


def replacing(s: Layer, hidden: Tensor) -> Tensor:
    s.inner = copy.deepcopy(s.inner)
    return s.inner(hidden)


def test_a_forward_that_replaces_its_modules_is_refused() -> None:
    model = Model()
    model.blocks = nn.ModuleList(Layer(replacing, inner=nn.Linear(2, 2)) for _ in range(2))
    with pytest.raises(ValueError, match=r"cannot be divided: its forward makes the module 'blocks\.\d\.inner' anew"):
        GPipe(model, devices=["cpu"] * 2, sample=torch.zeros(1, 2))


def test_a_model_that_was_called_by_position_is_freed() -> None:
    model = Model()
    pipe = GPipe(model, devices=["cpu"] * 2, sample=torch.zeros(1, 2))
    pipe(torch.zeros(2, 2))
    pipe.close()
    alive = weakref.ref(model)
    del model, pipe
    gc.collect()
    assert alive() is None
