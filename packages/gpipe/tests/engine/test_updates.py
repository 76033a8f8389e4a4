"""Updating parameters during a step gives bitwise the same results as updating them after it."""

from collections.abc import Callable
from contextlib import closing, nullcontext
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe import GPipe, LossSum

from ..layers import DOUBLE, MODES, Layer, linears, on_backward, rows, within
from .test_tied import Tie, model

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "one by one": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, foreach=False),
}


def squares(output: Tensor, target: Any = None) -> Tensor:
    return output.square().sum()


def counted(output: Tensor, target: Any = None) -> LossSum:
    return LossSum(output.square().sum(), output.numel())


def whole(output: Tensor, target: Any = None) -> Tensor:
    return (output - output.mean(0)).square().sum()


LOSSES: dict[str, dict[str, Any]] = {
    "a sum": {"loss_fn": squares, "reduction": "sum"},
    "counted": {"loss_fn": counted},
    "whole": {"loss_fn": whole},
}


def updated(layers: nn.Sequential, how: str, optimizer: str, during: bool, **options: Any) -> dict[str, Any]:
    """The parameters, the state of the optimizer and the losses of three steps, the first of two mini-batches."""
    loss, schedule = LOSSES[how.split(", ")[0]], how.split(", ")[1]
    places = ["cpu:0"] * len(layers)
    found = []
    with closing(GPipe(layers, [1] * len(layers), devices=places, chunks=3, offload=True, **options)) as pipe:
        own = OPTIMIZERS[optimizer](pipe.parameters())
        pipe.step(rows(), schedule=schedule, **loss)
        for _ in range(3):
            found.append(pipe.step(rows(), schedule=schedule, **loss, **({"optimizer": own} if during else {})))
            if not during:
                own.step()
                own.zero_grad()
            assert all(parameter.grad is None for parameter in pipe.parameters())
    return {"parameters": [*layers.parameters()], "state": own.state_dict()["state"], "losses": found}


@given(
    st.lists(st.none() | st.sampled_from(["weight", "bias"]), min_size=1, max_size=4),
    st.sampled_from(["a sum, 1f1b", "a sum, looped_bfs", "counted, zero_bubble", "counted, 1f1b", "whole, fill_drain"]),
    st.sampled_from([*OPTIMIZERS]),
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
)
def test_they_are_updated_as_after_the_step(
    ties: list[str | None], how: str, optimizer: str, mode: str, frozen: bool, inline: bool
) -> None:
    """Shared parameters are updated as well, once the last of their stages is finished."""
    shared = tuple(None if tie is None else Tie(tie, 0) for tie in [None, *ties])
    found = []
    for during in (False, True):
        with gpipe.inline() if inline else nullcontext():
            made = model(shared, frozen=frozen)
            found.append(
                within(60, lambda made=made, during=during: updated(made, how, optimizer, during, checkpoint=mode))
            )
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_parameters_of_loss_are_updated_at_end() -> None:
    """Their gradients are complete at the end of the step."""
    found = []
    for during in (False, True):
        layers, other = linears(4), nn.Parameter(torch.ones(3, dtype=DOUBLE))
        pipe = GPipe(layers, [1] * 4, devices=["cpu:0"] * 4, chunks=3, offload=True)
        weight, alone = layers[3].weight, nn.Parameter(torch.ones(3, dtype=DOUBLE))
        optimizer = torch.optim.SGD([*pipe.parameters(), other, alone], lr=0.1, momentum=0.9)

        def penalty(output: Tensor, weight: Tensor = weight, other: Tensor = other) -> Tensor:
            return (output * other).square().sum() + weight.square().sum() / 3

        for _ in range(2):
            alone.grad = torch.ones_like(alone)
            pipe.step(
                rows(),
                loss_fn=penalty,
                reduction="sum",
                schedule="1f1b",
                **({"optimizer": optimizer} if during else {}),
            )
            if not during:
                optimizer.step()
                optimizer.zero_grad()
        found.append([*pipe.parameters(), other, alone])
        pipe.close()
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_an_update_begins_while_earlier_stages_compute() -> None:
    """The layer of the first stage waits in its backward until the last stage was updated."""
    stepped = Event()

    def wait() -> None:
        assert stepped.wait(30)

    first = Layer(lambda s, x: on_backward(s.m[0](x), wait), linears(1)[0])
    layers = nn.Sequential(first, *linears(3))
    pipe = GPipe(layers, [1] * 4, devices=["cpu:0"] * 4, chunks=2, checkpoint="never", offload=True)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: stepped.set())
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    within(60, lambda: pipe.step(rows(), loss_fn=squares, reduction="sum", optimizer=optimizer))
    assert not any(torch.equal(a, b) for a, b in zip(before, pipe.parameters(), strict=True))
    pipe.close()


def test_failure_reports_updates_and_restores_gradients() -> None:
    def fail() -> None:
        assert fails is False, "in a backward"

    fails = False
    layers = nn.Sequential(Layer(lambda s, x: on_backward(s.m[0](x), fail), linears(1)[0]), *linears(3))
    pipe = GPipe(layers, [1] * 4, devices=["cpu:0"] * 4, chunks=2, checkpoint="never", offload=True)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(rows(), loss_fn=squares, reduction="sum")
    before = [parameter.grad.clone() for parameter in pipe.parameters()]
    fails = True
    with pytest.raises(AssertionError, match="in a backward") as caught:
        pipe.step(rows(), loss_fn=squares, reduction="sum", optimizer=optimizer)
    notes = [note for note in caught.value.__notes__ if "of 8 parameters of the optimizer were already updated" in note]
    updated = int(notes[0].split()[0]) if notes else 0
    grads = [parameter.grad for parameter in pipe.parameters()]
    assert sum(grad is None for grad in grads) == updated
    for own, grad in zip(before, grads, strict=True):
        assert grad is None or torch.equal(own, grad)
    fails = False
    pipe.zero_grad()
    pipe.step(rows(), loss_fn=squares, reduction="sum", optimizer=optimizer)
    pipe.close()


def test_anything_else_is_refused() -> None:
    pipe = GPipe(linears(2), [1, 1], devices=["cpu"] * 2, chunks=2)
    with pytest.raises(ValueError, match=r"offload=True.*call optimizer\.step\(\) after step\(\)"):
        pipe.step(rows(), loss_fn=squares, optimizer=torch.optim.SGD(pipe.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer; got str"):
        pipe.step(rows(), loss_fn=squares, optimizer="SGD")
