"""Layers a pipe must handle: stateful, with hooks, random, in-place, or keeping tensors across calls.

Functions have global names, so that layers can be pickled. All map ``(rows, WIDTH)`` to itself, in float64.
"""

from collections import namedtuple
from collections.abc import Callable
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gpipe

from .layers import DOUBLE, Overwrites, blocks

WIDTH = 4

Pair = namedtuple("Pair", "calls factor")
OUTSIDE: dict[str, Any] = {"calls": 0}
"""State that is in no module."""


class Odd(nn.Module):
    """A linear layer that does something odd besides."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)
        self.spare = nn.Parameter(torch.ones(WIDTH, dtype=DOUBLE))
        self.table = nn.Embedding(5, WIDTH, max_norm=0.5 if kind == "renorms" else None, dtype=DOUBLE)
        self.drop = nn.Dropout(0.4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.ones(WIDTH, dtype=DOUBLE))
        self.register_buffer("large", torch.ones(5000, dtype=DOUBLE))
        self.value: Any = STATES[kind][0] if kind in STATES else None
        self.all: list[Any] = []
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return ODD[self.kind](self, x)


STATES: dict[str, tuple[Any, Callable[[Any], tuple[Any, float]]]] = {
    "number": (1.0, lambda v: (v * 1.25, v)),
    "numpy number": (np.float64(1.0), lambda v: (v * 1.25, float(v))),
    "fraction": (Fraction(1, 2), lambda v: (v + Fraction(1, 4), float(v))),
    "named tuple": (Pair(1, 0.5), lambda v: (v._replace(calls=v.calls + 1), v.calls * v.factor)),
    "text": ("a", lambda v: (v + "a", len(v) / 4)),
    "dict anew": ({"calls": 1}, lambda v: ({"calls": v["calls"] + 1}, v["calls"] / 4)),
    "tensor": (torch.ones((), dtype=DOUBLE), lambda v: (v * 1.25, float(v))),
}
"""For each kind of state: an initial value, and a function that returns the next value and the current factor."""


def attribute(s: Odd, x: Tensor) -> Tensor:
    s.value, factor = STATES[s.kind][1](s.value)
    return s.linear(x) * factor


def listed(s: Odd, x: Tensor) -> Tensor:
    s.all.append(len(s.all))
    return s.linear(x) * len(s.all) / 4


def outside(s: Odd, x: Tensor) -> Tensor:
    OUTSIDE["calls"] += 1
    return s.linear(x) * (OUTSIDE["calls"] % 7)


def polite(s: Odd, x: Tensor) -> Tensor:
    if not gpipe.is_recomputing():
        OUTSIDE["calls"] += 1
    return s.linear(x)


def counted(s: Odd, x: Tensor) -> Tensor:
    s.calls += 1
    return s.linear(x) * (s.calls % 5 + 1)


def averaged(s: Odd, x: Tensor) -> Tensor:
    y: Tensor = s.linear(x) * s.mean.clone()
    s.mean = 0.5 * s.mean + x.detach().mean(0)
    return y


def by_numpy(s: Odd, x: Tensor) -> Tensor:
    y: Tensor = s.linear(x) * s.mean.clone()
    s.mean.numpy()[...] = 0.5 * s.mean.numpy() + 0.25
    return y


def large(s: Odd, x: Tensor) -> Tensor:
    y: Tensor = s.linear(x) * s.large[7].clone()
    s.large.mul_(0.9)
    return y


def decays(s: Odd, x: Tensor) -> Tensor:
    with torch.no_grad():
        s.linear.weight.mul_(0.9)
    return s.linear(x)


def decays_by_data(s: Odd, x: Tensor) -> Tensor:
    s.linear.weight.data = s.linear.weight.data * 0.9
    return s.linear(x)


def looked_up(s: Odd, x: Tensor) -> Tensor:
    return s.linear(x) + s.table((x.detach()[:, 0] * 3).long().abs() % 5)


def in_place_later(s: Odd, x: Tensor) -> Tensor:
    s.calls += 1
    return x.mul_(2) if int(s.calls) % 3 == 2 else x * s.spare


def keeps(s: Odd, x: Tensor) -> Tensor:
    y: Tensor = s.linear(x).tanh()
    s.kept = y.square().mean()
    return y


def carries(s: Odd, x: Tensor) -> Tensor:
    y: Tensor = s.linear(x)
    y = y if s.kept is None else y + s.kept
    s.kept = y.mean(0).detach()
    return y


def carries_graph(s: Odd, x: Tensor) -> Tensor:
    y: Tensor = s.linear(x)
    y = y if s.kept is None else y + s.kept
    s.kept = y.mean(0)
    return y


def hooks_module(s: Odd, x: Tensor) -> Tensor:
    handle = s.linear.register_forward_hook(lambda module, inputs, output: output * 2)
    y: Tensor = s.linear(x)
    handle.remove()
    return y


def without_grad(s: Odd, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = s.linear(x)
    return y * s.spare


def grad_inside(s: Odd, x: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(s.linear(leaf).pow(3).sum(), leaf)
    return x * slope


def func_inside(s: Odd, x: Tensor) -> Tensor:
    return x * torch.func.vmap(torch.func.grad(lambda row: s.linear(row).pow(3).sum()))(x.detach()).detach()


def switches_grad(s: Odd, x: Tensor) -> Tensor:
    s.linear.weight.requires_grad_(False)
    y: Tensor = s.linear(x)
    s.linear.weight.requires_grad_(True)
    return y


def casts(s: Odd, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x.float() @ torch.ones(WIDTH, WIDTH)).to(DOUBLE) * s.spare


@contextmanager
def _shadowed(s: Odd) -> Any:
    s.linear.__dict__["forward"] = lambda x: nn.Linear.forward(s.linear, x) * 2
    yield
    del s.linear.__dict__["forward"]


def patched(s: Odd, x: Tensor) -> Tensor:
    with _shadowed(s):
        return s.linear(x)


def raises_later(s: Odd, x: Tensor) -> Tensor:
    s.calls += 1
    if int(s.calls) == 4:
        raise ZeroDivisionError("at the fourth call")
    return s.linear(x)


ODD: dict[str, Callable[[Odd, Tensor], Tensor]] = {
    **dict.fromkeys(STATES, attribute),
    "renorms": looked_up,
    **{
        each.__name__: each
        for each in (
            listed, outside, polite, counted, averaged, by_numpy, large, decays, decays_by_data, looked_up,
            in_place_later, keeps, carries, carries_graph, hooks_module, without_grad, grad_inside, func_inside,
            switches_grad, casts, patched, raises_later,
        )
    },
    "in_place": lambda s, x: x.mul_(0.5).add_(s.spare),
    "in_place_after": lambda s, x: s.linear(x).add_(1).tanh_(),
    "viewed": lambda s, x: x.t().t(),
    "strided": lambda s, x: x.as_strided(x.shape, x.stride(), x.storage_offset()) * s.spare,
    "given_away": lambda s, x: s.mean.expand(len(x), WIDTH) if s.training else x + s.spare,
    "drops": lambda s, x: s.drop(s.linear(x)),
    "drops_in_place": lambda s, x: nn.functional.dropout(s.linear(x), 0.4, s.training, inplace=True),
    "skips_at_random": lambda s, x: s.linear(x) if s.training and float(torch.rand(())) < 0.5 else x,
    "checkpointed": lambda s, x: checkpoint(s.linear, x, use_reentrant=False),
    "detaches": lambda s, x: s.linear(x.detach()),
    "blocks": lambda s, x: blocks(x) + s.linear(x),
    "overwrites": lambda s, x: Overwrites.apply(s.linear(x)) + x,
    "sometimes": lambda s, x: s.linear(x) if float(x.detach().sum()) > 0 else x * s.spare,
    "not_contiguous": lambda s, x: s.linear(x).t().contiguous().t(),
    "module_anew": lambda s, x: nn.Softplus(beta=2)(s.linear(x)),
}  # fmt: skip

DRAWING = {"drops", "drops_in_place", "skips_at_random"}


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH, dtype=DOUBLE),
    "tanh": nn.Tanh,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "identity": nn.Identity,
    "dropout": nn.Dropout,
    "batch norm": lambda: nn.BatchNorm1d(WIDTH, dtype=DOUBLE),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)),
}

NAMES = (*PLAIN, *ODD)


def make(name: str) -> nn.Module:
    return PLAIN[name]() if name in PLAIN else Odd(name)


def draws(name: str) -> bool:
    return name == "dropout" or name in DRAWING
