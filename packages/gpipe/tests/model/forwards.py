"""Random models with their own forward: statements over blocks, modules, parameters and previous results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import Function

import gpipe

from ..layers import OnGradient

WIDTH = 4
LISTS = ("layers", "others", "groups")
KINDS = ("tensor", "tanh", "gelu", "tuple", "dict", "counting", "in place", "frozen", "keyword")


class Statement(NamedTuple):
    """A statement that computes a new tensor from two of the previous ones."""

    name: str
    a: int
    b: int


class Call(NamedTuple):
    """A call of a block that is not a recomputation: in which thread, and of how many rows."""

    thread: str
    rows: int


@dataclass
class Output:
    """An output in the style of Hugging Face models."""

    loss: Any
    logits: Any


@dataclass(frozen=True)
class Told:
    """A model described by its statements.

    Attributes:
        statements: the statements of its forward; the name of a list calls the next block of that list.
        kinds: the kinds of the blocks, repeated.
        last: the index of the tensor returned with the output of the head.
        returns: the kind of the output.
        frozen: the numbers of parameters that need no gradient.
        tied: whether the first and the last block share their weight.
    """

    statements: tuple[Statement, ...]
    kinds: tuple[str, ...] = ("tensor",)
    last: int = -1
    returns: str = "tuple"
    frozen: frozenset[int] = frozenset()
    tied: bool = False

    def model(self) -> Model:
        """Return a model that is the same in every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Model(self).double()


class Block(nn.Module):
    """A layer, which notes its calls."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.requires_grad_(kind != "frozen")
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        noted: list[Call] = []
        self.noted = lambda: noted  # a function: a list would be state, which recomputations restore

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Any:
        if not gpipe.is_recomputing():
            self.noted().append(Call(threading.current_thread().name, len(x)))
        if self.kind == "in place":
            x.mul_(0.5)
        y = self.linear(x)
        if keep is not None:
            y = y * keep
        if self.kind == "tanh":
            return y.tanh()
        if self.kind == "gelu":
            return x + nn.functional.gelu(y)
        if self.kind == "tuple":
            return y, None, x.detach() > 0, len(x)
        if self.kind == "dict":
            return {"none": None, "main": y, "nested": [{"sizes": y.detach().abs()}]}
        if self.kind == "counting":
            self.seen += len(x)
        return y


def main_of(value: Any) -> Tensor:
    if isinstance(value, dict):
        return value["main"] + value["nested"][0]["sizes"] * 0.1
    return torch.where(value[2], value[0], value[0] * 0.5) if isinstance(value, tuple) else value


class Model(nn.Module):
    """A model with the forward described by ``told``."""

    def __init__(self, told: Told) -> None:
        super().__init__()
        self.told = told
        self.embed, self.linear = nn.Linear(2, WIDTH), nn.Linear(WIDTH, WIDTH)
        called = [name for name, _, _ in told.statements if name in LISTS]
        made = [Block(told.kinds[k % len(told.kinds)]) for k in range(len(called))]
        of = {name: [block for block, each in zip(made, called, strict=True) if each == name] for name in LISTS}
        self.layers, self.others = (
            nn.ModuleList(of["layers"]),
            nn.ModuleDict({f"b{k}": b for k, b in enumerate(of["others"])}),
        )
        groups = of["groups"]
        self.groups = nn.ModuleList(nn.ModuleList(groups[k : k + 2]) for k in range(0, len(groups), 2))
        self.norm, self.scale, self.head = nn.LayerNorm(WIDTH), nn.Parameter(torch.rand(WIDTH)), nn.Linear(WIDTH, 3)
        self.register_buffer("table", torch.rand(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        if told.tied:
            made[-1].linear.weight = made[0].linear.weight
        for k, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(parameter.requires_grad and k not in told.frozen)

    def blocks(self) -> list[Block]:
        return [module for module in self.modules() if isinstance(module, Block)]

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, labels: Tensor | None = None, num_items_in_batch: Any = None
    ) -> Any:
        keep = (x[:, :1] > -1).to(x.dtype) if mask is None else mask
        made, called = [self.embed(x)], [self.linear]
        lists = (self.layers, self.others.values(), (block for group in self.groups for block in group))
        blocks = dict(zip(LISTS, map(iter, lists), strict=True))
        for name, i, j in self.told.statements:
            a, b = made[i % len(made)], made[j % len(made)]
            if name in LISTS:
                called.append(next(blocks[name]))
                made.append(main_of(called[-1](a, keep=keep) if len(called) % 2 else called[-1](a)))
            elif name == "again":
                made.append(main_of(called[j % len(called)](a)))
            else:
                made.append(STATEMENTS[name](self, a, b))
        logits, other = self.head(made[-1]), made[self.told.last % len(made)]
        if labels is not None:
            each = (logits - labels).square().sum(1) + other.square().sum(1) * 0.1
            return Output(each.mean() if num_items_in_batch is None else each.sum() / num_items_in_batch, logits)
        return _returned(self.told.returns, logits, other)


def _returned(kind: str, logits: Tensor, other: Tensor) -> Any:
    if kind == "tensor":
        return logits
    if kind == "dict":
        return {"logits": logits, "none": None, "nested": [other]}
    return (logits, other) if kind == "tuple" else Output(None, logits)


def _overwritten(_: Any, a: Tensor, b: Tensor) -> Tensor:
    found = a * 1
    found[:, 0] = b[:, 1]
    return found


def _added_to_view(_: Any, a: Tensor, b: Tensor) -> Tensor:
    a[:, :2] += 0.5
    return a


def _without_grad(model: Any, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        found = model.linear(a).exp()
    return b + found


def _branched(_: Any, a: Tensor, b: Tensor) -> Tensor:
    return a * 1 if a.detach().isfinite().all() else b


def _counted(model: Any, a: Tensor, b: Tensor) -> Tensor:
    model.calls += 1
    return a + b


class WithValues(Function):
    """Reads values in its forward, so that it cannot run on ``meta``."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor) -> Tensor:
        assert a.isfinite().all()
        ctx.save_for_backward(a, weight)
        return a @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, weight = ctx.saved_tensors
        return gradient @ weight.t(), a.t() @ gradient


STATEMENTS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "add": lambda model, a, b: a + b,
    "gate": lambda model, a, b: a * b.sigmoid(),
    "scale": lambda model, a, b: a * model.scale,
    "element": lambda model, a, b: torch.lerp(a, b, model.scale[0]),
    "buffer": lambda model, a, b: a + model.table,
    "module": lambda model, a, b: model.norm(a),
    "linear": lambda model, a, b: model.linear(a).tanh(),
    "changed": lambda model, a, b: model.linear(a).mul_(2).add_(b),
    "weight": lambda model, a, b: a @ model.linear.weight,
    "weight of a block": lambda model, a, b: a @ model.blocks()[0].linear.weight.t(),
    "detach": lambda model, a, b: a.detach() * b,
    "view": lambda model, a, b: a.view(-1, 2, 2).transpose(1, 2).flatten(1),
    "parts": lambda model, a, b: torch.stack([*a.unbind(1)], 1) + torch.cat(b.chunk(2, -1)[::-1], -1),
    "cat": lambda model, a, b: torch.cat([a[:, :2], b[:, 2:]], -1),
    "in place": lambda model, a, b: a.mul_(0.5).add_(b.detach() * 0.1),
    "in place of a copy": lambda model, a, b: a.clone().mul_(2).add_(b),
    "overwritten": _overwritten,
    "added to view": _added_to_view,
    "size": lambda model, a, b: a / b.shape[-1],
    "made": lambda model, a, b: a + torch.arange(WIDTH, device=a.device) + torch.ones_like(b),
    "mode": lambda model, a, b: a * 2 if model.training else b,
    "no grad": _without_grad,
    "branch": _branched,
    "counted": _counted,
    "function": lambda model, a, b: OnGradient.apply(a * 1, lambda gradient: gradient * 0.5),
    "function with values": lambda model, a, b: WithValues.apply(a, model.linear.weight),
}

IN_PLACE = ("in place", "added to view")
NEAR = st.integers(-3, -1) | st.integers(0, 9)


@st.composite
def models(draw: st.DrawFn, *, least: int = 2, in_place: bool = True, without: tuple[str, ...] = ()) -> Told:
    """Draw a model with at least ``least`` blocks, ``without`` some statements."""
    left_out = (*without, *(() if in_place else IN_PLACE))
    names = [name for name in (*LISTS, "again", *STATEMENTS) if name not in left_out]
    statements = st.builds(Statement, st.sampled_from(LISTS) | st.sampled_from(names), NEAR, NEAR)
    told = draw(st.lists(statements, min_size=least, max_size=12))
    missing = max(0, least - sum(name in LISTS for name, _, _ in told))
    told += [Statement("layers", -1, 0)] * missing
    kinds = [kind for kind in KINDS if in_place or kind != "in place"]
    return Told(
        tuple(told),
        tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))),
        draw(NEAR),
        draw(st.sampled_from(["tensor", "tuple", "dict", "dataclass"])),
        draw(st.frozensets(st.integers(0, 12), max_size=4)),
        draw(st.booleans()),
    )
