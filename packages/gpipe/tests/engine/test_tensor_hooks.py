"""Hooks that layers register on tensors fire as often, and with the same, as in the plain loop over micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe

from ..layers import DOUBLE, assert_same, linears, piped, rows
from ..schedules import ALONE

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("never", "except_last", "always")
PLACES = ("given", "own", "linear", "by parameter")


class Hooked(nn.Module):
    """Registers a hook on one of the tensors of its forward."""

    def __init__(self, place: str, hook: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=DOUBLE)
        self.place = place
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        own = x.sin()
        linear = self.linear(own)
        scaled = linear * self.linear.bias
        tensor = dict(zip(PLACES, (x, own, linear, scaled), strict=True))[self.place]
        if tensor.requires_grad:
            tensor.register_hook(self.hook)
        return x + scaled


def hooked(places: list[str], heard: list[tuple[int, Tensor]]) -> nn.Sequential:
    """Layers whose hooks append to ``heard`` and change the gradient."""

    def hook(k: int) -> Callable[[Tensor], Tensor]:
        return lambda gradient: heard.append((k, gradient.clone())) or gradient * 0.5 + 0.1

    torch.manual_seed(0)
    return nn.Sequential(*(Hooked(place, hook(k)) for k, place in enumerate(places)))


def in_order(heard: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    return sorted(heard, key=lambda each: (each[0], each[1].tolist()))


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.lists(st.sampled_from(PLACES), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(MODES),
    st.sampled_from([None, *ALONE]),
    st.booleans(),
)
def test_as_often_and_with_the_same_as_in_the_plain_loop(
    places: list[str], stages: int, chunks: int, mode: str, schedule: str | None, inline: bool
):
    heard: tuple[list[Any], list[Any]] = [], []
    model = hooked(places, heard[0])
    stages = min(stages, len(places))
    balance = [1] * (stages - 1) + [len(places) - stages + 1]
    x = rows(6)
    for _ in range(2):
        for part in x.chunk(chunks):
            model(part).square().sum().backward()
    pipe = gpipe.GPipe(
        hooked(places, heard[1]), balance, devices=[f"cpu:{j}" for j in range(stages)], chunks=chunks, checkpoint=mode
    )
    with closing(pipe), gpipe.inline() if inline else nullcontext():
        for _ in range(2):
            if schedule is None:
                pipe(x).square().sum().backward()
            else:
                pipe.step(x, loss_fn=lambda y, _: y.square().sum(), schedule=schedule, reduction="sum")
    assert_same(pipe, model)
    torch.testing.assert_close(in_order(heard[1]), in_order(heard[0]))


class OnParameter(nn.Module):
    """A layer whose forward registers a hook on its weight; it removes it again if ``tidy``."""

    def __init__(self, register: str, tidy: bool) -> None:
        super().__init__()
        self.layer, self.register, self.tidy = linears(1)[0], register, tidy

    def forward(self, x: Tensor) -> Tensor:
        handle = getattr(self.layer.weight, self.register)(lambda _: None)
        y: Tensor = self.layer(x)
        if self.tidy:
            handle.remove()
        return y


@given(
    st.sampled_from(["register_hook", "register_post_accumulate_grad_hook"]),
    st.booleans(),
    st.sampled_from(["never", "except_last", "always"]),
    st.sampled_from([None, "1f1b", "zero_bubble"]),
)
def test_hooks_that_a_forward_leaves_on_parameters_are_refused(
    register: str, tidy: bool, mode: str, way: str | None
) -> None:
    layers = [*linears(1), OnParameter(register, tidy), *linears(1)]
    pipe = piped(nn.Sequential(*layers), [1, 2], chunks=3, checkpoint=mode)

    def train() -> None:
        if way is None:
            pipe(rows()).sum().backward()
        else:
            pipe.step(rows(), loss_fn=lambda output, _: output.sum(), reduction="sum", schedule=way)

    if tidy:
        train()
        return
    with pytest.raises(RuntimeError, match=r"registered a hook on the parameter '1.layer.weight'"):
        train()
    assert all(parameter.grad is None for parameter in pipe.parameters())
