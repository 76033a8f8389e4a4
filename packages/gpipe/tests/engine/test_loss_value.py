"""What loss functions take and return, and what a step makes of it."""

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import GPipe

from ..layers import DOUBLE, Call, linears, piped, rows
from ..schedules import ALONE, each_schedule


def square(output: Tensor) -> Tensor:
    return output.square().mean()


class Capped(nn.Module):
    def forward(self, output: Tensor, cap: float = 0.1) -> Tensor:
        return output.clamp(max=cap).mean()


TAKES_ONE: dict[str, Callable[..., Any]] = {
    "default": lambda output, cap=0.1: output.clamp(max=cap).mean(),
    "keyword": lambda output, *, cap=0.1: output.clamp(max=cap).mean(),
    "any": lambda *given: Capped()(*given),
    "optional target": lambda output, target=None: square(output) if target is None else target,
    "module": Capped(),
    "method": Capped().forward,
    "partial": partial(Capped(), cap=0.2),
    "no signature": torch.median,
    "no signature, overloaded": torch.linalg.vector_norm,
}


@pytest.mark.parametrize("name", TAKES_ONE)
def test_defaults_of_other_arguments_stay(name: str) -> None:
    loss_fn, model = TAKES_ONE[name], linears()
    expected, pipe = loss_fn(model(rows())), piped(model, [1, 2], chunks=1)
    torch.testing.assert_close(pipe.step(rows(), loss_fn=loss_fn), expected.detach())
    torch.testing.assert_close(pipe.evaluate(rows(), loss_fn=loss_fn), expected.detach())


def test_a_second_argument_that_is_required_is_none() -> None:
    seen: list[Any] = []

    def both(output: Tensor, target: Any) -> Tensor:
        seen.append(target)
        return square(output)

    for loss_fn in (both, partial(both), wraps(both)(lambda *given: both(*given))):
        piped(linears(), [1, 2], chunks=3).step(rows(), loss_fn=loss_fn)
    assert seen == [None] * 9


def test_a_target_that_nobody_takes_is_refused() -> None:
    pipe = piped(linears(), [1, 2], chunks=3)
    for loss_fn in (square, partial(square), lambda output, *, cap=0.1: square(output)):
        with pytest.raises(TypeError, match="a target is given, but loss_fn takes the output alone"):
            pipe.step(rows(), rows(), loss_fn=loss_fn)
    with pytest.raises(TypeError, match="a target is given, but no loss_fn that takes it"):
        pipe.step(rows(), rows())


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class WithLoss(nn.Module):
    """A model that computes its loss, given labels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=DOUBLE)
        self.kind = kind

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.layer(x)
        loss = F.mse_loss(logits, labels)
        return {"scalar": loss, "dict": {"loss": loss, "logits": logits}, "dataclass": Output(loss, logits)}[self.kind]


@pytest.mark.parametrize("kind", ["scalar", "dict", "dataclass"])
@given(count=st.integers(1, 7), chunks=st.integers(1, 4), inline=st.booleans(), schedule=st.sampled_from(ALONE))
@settings(max_examples=settings.default.max_examples // 4)
def test_a_model_may_compute_its_loss(kind: str, count: int, chunks: int, inline: bool, schedule: str):
    plain = WithLoss(kind)
    pipe = GPipe(nn.Sequential(copy.deepcopy(plain)), [1], devices=["cpu"], chunks=chunks)
    batch = {"x": rows(count), "labels": rows(count).abs()}
    found = plain(**batch)
    loss = found if kind == "scalar" else found["loss"] if kind == "dict" else found.loss
    loss.backward()
    with gpipe.inline() if inline else closing(pipe):
        torch.testing.assert_close(pipe.evaluate(**batch), loss.detach())
        torch.testing.assert_close(pipe.step(**batch, schedule=schedule), loss.detach())
    torch.testing.assert_close(pipe[0].layer.weight.grad, plain.layer.weight.grad)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: x, r"got float64\[2, 3\]; give loss_fn=\.\.\., or what the model computes its loss from"),
        (lambda x: {"logits": x}, r"got {'logits': float64\[2, 3\]}; give loss_fn"),
        (lambda x: {"loss": x}, r"got {'loss': float64\[2, 3\]}"),
        (lambda x: (x.sum(), x), r"got \(float64\[\], float64\[2, 3\]\); set return_dict=True, give loss_fn"),
        (lambda x: None, "got None"),
    ],
)
@each_schedule
def test_an_output_that_is_no_loss_is_refused(schedule: str, output: Callable[[Tensor], Any], message: str):
    pipe = piped(nn.Sequential(*linears(), Call(output)), [2, 2], chunks=3)
    for parameter in pipe.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(TypeError, match=f"without a loss_fn the output must be the loss.*{message}"):
        pipe.step(rows(), schedule=schedule)
    assert all(parameter.grad.eq(1).all() for parameter in pipe.parameters())
    with pytest.raises(TypeError, match="without a loss_fn the output must be the loss"):
        pipe.evaluate(rows())
