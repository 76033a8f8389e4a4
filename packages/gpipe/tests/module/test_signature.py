"""A pipe is called as its first layer is, and says so."""

import copy
import inspect
from inspect import Parameter, Signature
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe import GPipe

NAMES = ["input_ids", "attention_mask", "labels", "x", "chunks", "name"]
ORDER = [Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY]


@st.composite
def signatures(draw: st.DrawFn) -> Signature:
    """Draw a signature with all kinds of parameters, some with defaults, which may be lists."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=4))
    kinds = sorted(draw(st.lists(st.sampled_from(ORDER), min_size=len(names), max_size=len(names))))
    required = draw(st.integers(0, len(names)))
    default = draw(st.sampled_from([None, 1, [1]]))
    found = [
        Parameter(name, kind, default=Parameter.empty if k < required else default)
        for k, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    if draw(st.booleans()):
        found.append(Parameter("kwargs", Parameter.VAR_KEYWORD))
    return Signature(found)


def layer_with(signature: Signature) -> nn.Module:
    class Layer(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args or kwargs

    itself = Parameter("self", Parameter.POSITIONAL_ONLY)
    Layer.forward.__signature__ = Signature([itself, *signature.parameters.values()])  # type: ignore[attr-defined]
    return Layer()


def piped(*layers: nn.Module) -> GPipe:
    return GPipe(nn.Sequential(*layers), [1] * len(layers), devices=["cpu"] * len(layers))


@given(signatures())
def test_the_signature_is_that_of_the_first_layer(signature: Signature) -> None:
    pipe = piped(layer_with(signature), nn.Linear(1, 1))
    assert inspect.signature(pipe.forward) == signature
    assert list(inspect.signature(type(pipe).forward).parameters)[1:] == list(signature.parameters)
    assert inspect.signature(copy.deepcopy(pipe).forward) == signature


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return tokens.exp()


class NamedAlike(Named):
    """A model with the same signature."""


@pytest.mark.parametrize("kind", [Named, NamedAlike])
def test_signature_of_custom_forward(kind: type[nn.Module]) -> None:
    pipe = GPipe(kind(), devices=["cpu"] * 2)
    assert list(inspect.signature(pipe.forward).parameters) == ["tokens", "labels"]
    assert type(pipe).__name__ == f"ModelPipeOf{kind.__name__}"


def test_equal_pipes_have_one() -> None:
    first, second = (piped(nn.Linear(1, 1), nn.ReLU()) for _ in range(2))
    assert type(first) is type(second) is type(copy.deepcopy(first)) is type(copy.copy(first))
    assert isinstance(first, GPipe)
    assert (type(first).__name__, type(first).__module__) == (GPipe.__name__, GPipe.__module__)
