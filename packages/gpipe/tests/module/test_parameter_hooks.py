"""Hooks of parameters fire once a run, with the whole gradient, as they do in the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ..layers import Call, assert_same, linears, piped, rows

pytestmark = pytest.mark.usefixtures("one_thread")

MODES = ("never", "except_last", "always")


def trained(model: nn.Module, times: int = 1) -> nn.Module:
    for _ in range(times):
        model(rows()).square().sum().backward()
    return model


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["see", "scale", "after"])), max_size=6),
    st.sampled_from([[3], [1, 2], [1, 1, 1]]),
    st.integers(1, 4),
    st.sampled_from(MODES),
    st.integers(1, 2),
)
def test_as_often_and_with_the_same_as_in_the_plain_model(
    hooks: list[tuple[int, str]], balance: list[int], chunks: int, mode: str, steps: int
):
    model = linears()
    pipe = piped(model, balance, chunks=chunks, checkpoint=mode)
    calls: list[list[Any]] = []
    for each in (model, pipe):
        calls.append(heard(each, hooks))
        trained(each, steps)
    pipe.close()
    assert_same(pipe, model)
    expected, found = (sorted(each, key=lambda call: call[:2]) for each in calls)
    assert [call[:2] for call in found] == [call[:2] for call in expected]
    torch.testing.assert_close([c[2] for c in found], [c[2] for c in expected])


def heard(model: nn.Module, hooks: list[tuple[int, str]]) -> list[Any]:
    """Attaches hooks; the list of (hook, step, gradient) that they append to."""
    calls: list[Any] = []
    parameters = list(model.parameters())

    def hear(k: int, gradient: Tensor) -> None:
        calls.append((k, sum(call[0] == k for call in calls), gradient.clone()))

    for k, (index, kind) in enumerate(hooks):
        parameter = parameters[index]
        if kind == "see":
            parameter.register_hook(lambda gradient, k=k: hear(k, gradient))
        elif kind == "scale":
            parameter.register_hook(lambda gradient: gradient * 0.5 + 1)
        else:
            parameter.register_post_accumulate_grad_hook(lambda p, k=k: hear(k, p.grad))
    return calls


@pytest.mark.parametrize("mode", MODES)
def test_optimizer_in_the_backward(mode: str):
    """Steps as soon as a gradient is whole, and lets it go."""
    models = [linears(), piped(linears(), [1, 2], chunks=3, checkpoint=mode)]
    for model in models:
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.9)

            def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                p.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        trained(model, 3)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


@pytest.mark.parametrize(("counted", "times"), [(False, 3), (True, 1)])
def test_hooks_of_a_free_tensor_fire_once_a_micro_batch(counted: bool, times: int) -> None:
    """A tensor that a layer closes over is nobody's parameter: nobody knows of it before its gradient arrives."""
    free = torch.ones(3, dtype=rows(6).dtype, requires_grad=True)
    calls: list[Tensor] = []
    free.register_hook(calls.append)
    pipe = piped(nn.Sequential(*linears(1), Call(lambda x: x * free)), [1, 1], chunks=3)

    def loss_fn(output: Tensor, _: None) -> Any:
        return (output.square().sum(), output.numel()) if counted else output.square().mean()

    pipe.step(rows(6), loss_fn=loss_fn)
    assert len(calls) == times
    assert free.grad is not None
    torch.testing.assert_close(torch.stack(calls).sum(0), free.grad)


def test_hooks_fire_twice_where_a_parameter_is_reached_twice() -> None:
    """Once with what comes through the pipe, and once with the caller's own use of the parameter."""
    pipe = piped(linears(), [1, 2], chunks=2)
    weight = pipe[0].weight
    calls: list[Tensor] = []
    weight.register_hook(calls.append)
    (pipe(rows()).square().sum() + weight.square().sum()).backward()
    assert len(calls) == 2
    torch.testing.assert_close(sum(calls), weight.grad)
