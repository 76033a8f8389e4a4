"""Sequentials with a sample each, out of layers that are easy or hard to profile."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import nn

WIDTH = 6

# For properties whose every example runs or draws a whole model.
fewer = settings(max_examples=settings().max_examples // 4)


class Call(nn.Module):
    """A layer that is a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class OnGradient(torch.autograd.Function):
    """The identity, whose backward maps the gradient with a function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.function(gradient), None


def twin(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One output that requires a gradient and one that does not."""
    return x * 2, x.detach()


def join(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return pair[0] + pair[1]


def to_dict(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"value": x, "mask": x > 0}


def from_dict(tree: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.where(tree["mask"], tree["value"], tree["value"] * 0.1)


def detached(x: torch.Tensor) -> torch.Tensor:
    """Needs no gradient and gives none."""
    return x.detach() + 1


PIECES = {
    "linear": lambda: [nn.Linear(WIDTH, WIDTH)],
    "frozen": lambda: [nn.Linear(WIDTH, WIDTH).requires_grad_(False)],
    "relu": lambda: [nn.ReLU()],
    "in-place": lambda: [nn.ReLU(inplace=True)],
    "dropout": lambda: [nn.Dropout(0.5)],
    "gelu": lambda: [nn.GELU()],
    "identity": lambda: [nn.Identity()],
    "view": lambda: [nn.Flatten()],
    "tuple": lambda: [Call(twin), Call(join)],
    "dict": lambda: [Call(to_dict), Call(from_dict)],
    "detach": lambda: [Call(detached)],
    "nested": lambda: [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))],
    "batch norm": lambda: [nn.BatchNorm1d(WIDTH)],
    "layer norm": lambda: [nn.LayerNorm(WIDTH)],
}


def models(max_size: int = 5, without: Collection[str] = ()) -> st.SearchStrategy[nn.Sequential]:
    names = st.lists(st.sampled_from(sorted(set(PIECES).difference(without))), min_size=1, max_size=max_size)
    return names.map(lambda chosen: nn.Sequential(*(layer for name in chosen for layer in PIECES[name]())))


@st.composite
def samples(draw: st.DrawFn, min_rows: int = 2) -> torch.Tensor:
    rows = draw(st.integers(min_rows, 9))
    return torch.rand(rows, WIDTH, requires_grad=draw(st.booleans()))
