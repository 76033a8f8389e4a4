"""Arguments and results of loss functions, and how a step uses them."""

import copy
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial, wraps
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import GPipe, LossSum

from ..layers import DOUBLE, Call, assert_same, linears, piped, rows
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
    assert seen == [None] * 3


def test_a_target_that_nobody_takes_is_refused() -> None:
    pipe = piped(linears(), [1, 2], chunks=3)
    for loss_fn in (square, partial(square), lambda output, *, cap=0.1: square(output)):
        with pytest.raises(TypeError, match="got a target, but loss_fn accepts only the output"):
            pipe.step(rows(), rows(), loss_fn=loss_fn)
    with pytest.raises(TypeError, match="got a target but no loss_fn"):
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
        torch.testing.assert_close(pipe.evaluate(**batch, reduction="mean"), loss.detach())
        torch.testing.assert_close(pipe.step(**batch, reduction="mean", schedule=schedule), loss.detach())
    torch.testing.assert_close(pipe[0].layer.weight.grad, plain.layer.weight.grad)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: x, r"got float64\[2, 3\]; give loss_fn=\.\.\., or what the model computes its loss from"),
        (lambda x: {"logits": x}, r"got {'logits': float64\[2, 3\]}; give loss_fn"),
        (lambda x: {"loss": x}, r"got {'loss': float64\[2, 3\]}"),
        (lambda x: (x, x), r"got \(float64\[2, 3\], float64\[2, 3\]\); set return_dict=True, give loss_fn"),
        (lambda x: (x.sum(), x.mean()), r"got \(float64\[\], float64\[\]\)"),
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


def measured(*metrics: Any) -> Callable[[Tensor, Tensor], Any]:
    """A loss with metrics, others for each second micro-batch."""
    turns = cycle(metrics)

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        found, loss = next(turns), LossSum(F.mse_loss(output, target, reduction="sum"), output.numel())
        return loss if found is None else (loss, found)

    return loss_fn


def assert_refused(loss_fn: Any, schedule: str | None, kind: type[Exception], message: str) -> None:
    """Check the error and its note on the partition. Nothing has changed, and the next step is right."""
    pipe, model = piped(linears(), [1, 2], chunks=3), linears()
    with pytest.raises(kind, match=message) as caught:
        pipe.step(rows(), rows(), loss_fn=loss_fn, schedule=schedule)
    notes = " ".join(caught.value.__notes__)
    assert "in partition 1" in notes
    assert ("the loss of all 3 micro-batches" in notes) == (schedule is None)
    assert all(p.grad is None for p in pipe.parameters())
    if schedule is None and "grad" not in message:
        with pytest.raises(kind, match=message):
            pipe.evaluate(rows(), rows(), loss_fn=loss_fn)
    pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=schedule)
    F.mse_loss(model(rows()), rows()).backward()
    assert_same(pipe, model)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("loss_fn", "kind", "message"),
    [
        (lambda o, t: 3.0, TypeError, "returned float; expected a scalar tensor"),
        (lambda o, t: None, TypeError, "returned NoneType"),
        (lambda o, t: [o.sum()], TypeError, "returned list"),
        (lambda o, t: o - t, ValueError, r"shape \(2, 3\); expected a scalar: take its mean"),
        (lambda o, t: o.sum(0, keepdim=True)[:, :1], ValueError, r"shape \(1, 1\)"),
        (lambda o, t: LossSum(o.sum(1), 3), ValueError, r"shape \(2,\)"),
        (lambda o, t: o.detach().sum(), ValueError, "does not require grad"),
        (lambda o, t: LossSum(t.sum(), 3), ValueError, "does not require grad"),
        (lambda o, t: (o.sum(), 3), ValueError, r"tuple of 2, whose second number may be a count or a metric.*LossSum"),
        (
            lambda o, t: (o.sum(), o.mean()),
            ValueError,
            r"tuple of 2, whose second number.*\(loss, {\"name\": metric}\)",
        ),
        (lambda o, t: (o.sum(), 3, {"a": 1}), ValueError, r"tuple of 3, whose second number may be a count"),
        (lambda o, t: (o.sum(), "3"), ValueError, r"tuple of 2; expected a scalar tensor, or LossSum\(total, count\)"),
        (lambda o, t: ({"a": 1}, o.sum()), ValueError, "tuple of 2; expected a scalar tensor"),
        (lambda o, t: (), ValueError, "tuple of 0"),
        (lambda o, t: (o + 1j).sum(), TypeError, r"complex128; expected a real scalar: take its \.real or \.abs"),
        (lambda o, t: LossSum((o + 1j).sum(), 3), TypeError, "complex128"),
        (lambda o, t: LossSum(o.sum(), o.square().sum()), ValueError, r"count that requires grad.*count\.detach\(\)"),
        (lambda o, t: LossSum(o.sum(), torch.ones(3)), ValueError, r"count of shape \(3,\); expected one number"),
        (
            lambda o, t: LossSum(o.sum(), torch.ones(()) * 1j),
            TypeError,
            "count of torch.complex64; expected a real number",
        ),
        (lambda o, t: LossSum(o.sum(), "3"), TypeError, "count of str; expected a real number"),
        (lambda o, t: LossSum(o.sum(), None), TypeError, "count of NoneType"),
        (measured({"a": "text"}), TypeError, r"metrics\['a'\] of loss_fn is of type str; expected a tensor or"),
        (measured({"a": {"b": 1}}), TypeError, r"metrics\['a'\] of loss_fn is of type dict; .* flattened"),
        (measured({"a": None}), TypeError, r"metrics\['a'\] of loss_fn is of type NoneType"),
    ],
)
@pytest.mark.parametrize("schedule", [None, *ALONE])
def test_invalid_loss_raises_with_partition(
    schedule: str | None, loss_fn: Any, kind: type[Exception], message: str
) -> None:
    if schedule == "fill_drain":  # which computes a full-batch loss, like the default schedule
        with pytest.raises(kind, match=message.replace("(2,", "(6,")):
            piped(linears(), [1, 2], chunks=3).step(rows(), rows(), loss_fn=loss_fn, schedule=schedule)
        return
    assert_refused(loss_fn, schedule, kind, message if schedule else message.replace("(2,", "(6,"))


@pytest.mark.parametrize(
    ("loss_fn", "kind", "message"),
    [
        (measured({"a": torch.ones(3)}), ValueError, r"must have the same names .* its shapes are \(3,\)"),
        (measured({"a": torch.ones(2)}, {"a": torch.ones(4)}), ValueError, r"its shapes are \(\d,\), \(\d,\)"),
        (measured({"a": 1}, {"b": 1}), ValueError, "instead of a dict with the leaves"),
        (measured({"a": torch.ones(2)}, {"a": torch.ones(2).int()}), ValueError, "they may differ in rows only"),
        (measured(None, {"a": 1}), ValueError, "loss_fn returned metrics for some micro-batches only"),
        (measured({"a": 1}, None), ValueError, "loss_fn returned metrics for some micro-batches only"),
    ],
)
@pytest.mark.parametrize("schedule", [each for each in ALONE if each != "fill_drain"])
def test_metrics_of_micro_batches_have_to_go_together(
    schedule: str, loss_fn: Any, kind: type[Exception], message: str
) -> None:
    assert_refused(loss_fn, schedule, kind, message)
