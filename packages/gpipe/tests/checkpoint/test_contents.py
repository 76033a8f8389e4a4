"""Layers that count in objects of Python: a forward is counted once, or it is said that it counts twice."""

from __future__ import annotations

import collections
import fractions
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe

from ..layers import linears, rows

MODES = ("never", "except_last", "always")
WAYS = (None, "1f1b", "zero_bubble")


class Tally:
    def __init__(self) -> None:
        self.n = 0
        self.itself = self


class Pair(NamedTuple):
    n: int


def in_place(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def changed(value: Any) -> Any:
        change(value)
        return value

    return changed


def add_one(value: Any) -> None:
    value += 1


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], int]]] = {
    "int": (int, lambda n: n + 1, int),
    "tuple": (lambda: (0,), lambda n: (n[0] + 1,), lambda n: n[0]),
    "tensor": (lambda: torch.zeros(()), lambda n: n + 1, int),
    "number of NumPy": (lambda: np.float64(0), lambda n: n + 1, int),
    "array": (lambda: np.zeros(2), in_place(add_one), lambda n: int(n[1])),
    "named tuple": (lambda: Pair(0), lambda n: Pair(n.n + 1), lambda n: n.n),
    "fraction": (fractions.Fraction, lambda n: n + 1, int),
    "dict": (lambda: {"n": 0}, in_place(lambda n: n.update(n=n["n"] + 1)), lambda n: n["n"]),
    "nested": (lambda: {"a": [0]}, in_place(lambda n: n["a"].append(1)), lambda n: len(n["a"]) - 1),
    "list": (list, in_place(lambda n: n.append(0)), len),
    "list of tensors": (list, in_place(lambda n: n.append(torch.ones(1))), len),
    "set": (set, in_place(lambda n: n.add(len(n))), len),
    "deque": (collections.deque, in_place(lambda n: n.append(0)), len),
    "counter": (collections.Counter, in_place(lambda n: n.update("a")), lambda n: n["a"]),
    "object": (Tally, in_place(lambda n: setattr(n, "n", n.n + 1)), lambda n: n.n),
}
"""Of each kind of object: a new one, how a forward changes it, and what it has counted."""
RESTORED = {"int", "tuple", "tensor"}


class Counting(nn.Module):
    """A layer that counts its forwards; if ``counts``, the count is in what it computes."""

    def __init__(self, kind: str, counts: bool) -> None:
        super().__init__()
        start, self.change, self.count = COUNTERS[kind]
        self.state, self.counts = start(), counts

    def forward(self, x: Tensor) -> Tensor:
        self.state = self.change(self.state)
        return x * (1 + self.count(self.state)) if self.counts else x * 1


def train(pipe: GPipe, way: str | None) -> None:
    if way is None:
        pipe(rows()).square().sum().backward()
    else:
        pipe.step(rows(), loss_fn=lambda output, _: output.square().sum(), schedule=way)


@given(
    st.sampled_from(sorted(COUNTERS)),
    st.booleans(),
    st.sampled_from(MODES),
    st.sampled_from(WAYS),
    st.sampled_from([1, 2, 3, 6]),
)
def test_a_forward_counts_once_or_it_is_said(kind: str, counts: bool, mode: str, way: str | None, chunks: int) -> None:
    layer = Counting(kind, counts)
    pipe = GPipe(
        nn.Sequential(*linears(1), layer, *linears(1)), [2, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=mode
    )
    recomputes = mode == "always" or (mode == "except_last" and chunks > 1)
    if recomputes and kind not in RESTORED and counts:
        with pytest.raises(RuntimeError, match="another output"):
            train(pipe, way)
        return
    with logged() as messages:
        train(pipe, way)
    if recomputes and kind not in RESTORED:
        (message,) = messages
        assert "a recomputation changed what '1.state' contains" in message
    else:
        assert layer.count(layer.state) == chunks
        assert messages == []


@contextmanager
def logged() -> Iterator[list[str]]:
    """What gpipe logs meanwhile."""
    messages: list[str] = []
    handler = logging.Handler()
    # That one chunk does not overlap is said by the pipe itself.
    handler.addFilter(lambda record: "overlaps" not in record.getMessage())
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gpipe")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


class Caching(nn.Module):
    """A layer whose forward keeps what it computes, under a key: a second time changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}
        self.last: list[Tensor] = []
        self.options = Tally()

    def forward(self, x: Tensor) -> Tensor:
        self.last = [x.detach()]
        if len(x) not in self.masks:
            self.masks[len(x)] = torch.ones_like(x).tril()
        return x * self.masks[len(x)]


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_is_no_count(way: str | None) -> None:
    layer = Caching()
    pipe = GPipe(nn.Sequential(*linears(1), layer), [1, 1], devices=["cpu"] * 2, chunks=4, checkpoint="always")
    with logged() as messages:
        for _ in range(2):
            train(pipe, way)
    assert messages == []
    assert len(layer.masks) == 1  # three micro-batches of two rows are alike


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is .*:DeprecationWarning")
@pytest.mark.parametrize("mode", MODES)
def test_scripted_layers_work_without_recomputation(mode: str) -> None:
    scripted = torch.jit.script(linears(1)[0])
    pipe = GPipe(nn.Sequential(scripted, *linears(1)), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=mode)
    refused = pytest.raises(RuntimeError, match=r"'0' is a scripted module .* checkpoint='never'")
    with nullcontext() if mode == "never" else refused:
        train(pipe, "1f1b")
