"""A pipe computes what the plain model computes on the whole mini-batch: outputs, and all gradients."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import GPipe, inline

from .strategies import DOUBLE, IMPURE, KINDS, Kind, balances, models

pytestmark = pytest.mark.timeout(100)

MODES = ["always", "except_last", "never"]


class Problem(NamedTuple):
    """A model, how to cut it, and what to feed it."""

    model: nn.Sequential
    balance: list[int]
    chunks: int
    checkpoint: str
    x: Tensor
    input_grad: bool
    training: bool
    runs: int


@st.composite
def problems(draw: st.DrawFn, kinds: dict[str, Kind] = KINDS) -> Problem:
    """Also more chunks than rows, and rows that cannot be divided evenly."""
    model, shape = draw(models(kinds).filter(len_of_model))
    return Problem(
        model=model,
        balance=draw(balances(len(model))),
        chunks=draw(st.integers(1, 6)),
        checkpoint=draw(st.sampled_from(MODES)),
        x=torch.randn(draw(st.integers(1, 7)), *shape, dtype=DOUBLE),
        input_grad=draw(st.booleans()),
        training=draw(st.booleans()),
        runs=draw(st.integers(1, 2)),
    )


def len_of_model(made: tuple[nn.Sequential, Any]) -> int:
    return len(made[0])


class Result(NamedTuple):
    output: Tensor
    input_grad: Tensor | None
    parameter_grads: dict[str, Tensor | None]


def results(module: nn.Module, problem: Problem) -> list[Result]:
    """What a module computes, run after run; gradients accumulate."""
    found = []
    for _ in range(problem.runs):
        x = problem.x.clone().requires_grad_(problem.input_grad)
        output = module(x.clone())
        if output.requires_grad:
            weights = torch.linspace(-1, 2, output.numel(), dtype=DOUBLE).view_as(output)
            (output * weights).sum().backward()
        parameters = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        found.append(Result(output.detach().clone(), x.grad, parameters))
    return found


def assert_equal(found: list[Result], expected: list[Result]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def piped(problem: Problem) -> GPipe:
    return GPipe(
        copy.deepcopy(problem.model),
        problem.balance,
        devices=["cpu"] * len(problem.balance),
        chunks=problem.chunks,
        checkpoint=problem.checkpoint,
    ).train(problem.training)


each_way = pytest.mark.parametrize("way", [contextlib.nullcontext, inline], ids=["threaded", "inline"])


@each_way
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems())
def test_parity_with_the_plain_model(way: Any, problem: Problem) -> None:
    pipe = piped(problem)
    with way():
        found = results(pipe, problem)
    pipe.close()
    assert_equal(found, results(problem.model, problem))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(problem=problems(KINDS | IMPURE))
def test_layers_that_overwrite_what_is_needed_give_the_right_gradient_or_an_error(problem: Problem) -> None:
    with inline():
        try:
            found = results(piped(problem), problem)
        except RuntimeError as refusal:
            assert "inplace" in str(refusal) or "in place" in str(refusal)  # noqa: PT017
            return
    for layer in problem.model.modules():
        if hasattr(layer, "inplace"):
            layer.inplace = False
    assert_equal(found, results(problem.model, problem))
