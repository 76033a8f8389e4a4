"""Attributes that a pipe does not define are the wrapped model's."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe


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
    pipe = GPipe(model, devices=["cpu"] * 2)
    assert (pipe.config, pipe.tags, pipe.width, pipe.sizes()) == (model.config, ("small",), 2, model.sizes())
    assert pipe.config is model.config
    assert pipe.chunks == 1  # the pipe's own attributes have priority
    assert pipe._hidden == 1
    for name in ("__hidden", "nothing"):
        with pytest.raises(AttributeError, match=f"Pipe.*{name}"):
            getattr(pipe, name)
    torch.testing.assert_close(pipe.generate(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_setting_and_deleting_attributes_affects_model() -> None:
    model = Model()
    pipe = GPipe(model, devices=["cpu"] * 2)
    model._steps = model.steps = 0
    pipe._steps += 1
    pipe.steps += 1
    assert (model._steps, model.steps) == (1, 1)
    del pipe._steps, pipe.steps
    assert not hasattr(model, "_steps")
    with pytest.raises(AttributeError, match="_steps"):
        del pipe._steps


def test_a_sequential_model_answers_nothing() -> None:
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=["cpu"])
    with pytest.raises(AttributeError, match="append"):
        pipe.append(nn.Linear(2, 2))


def test_model_called_with_positional_arguments_is_freed() -> None:
    model = Model()
    pipe = GPipe(model, devices=["cpu"] * 2)
    pipe(torch.zeros(2, 2))
    pipe.close()
    alive = weakref.ref(model)
    del model, pipe
    gc.collect()
    assert alive() is None
