"""The loss of a step: that of the whole mini-batch, however it is put together from its micro-batches."""

from collections.abc import Callable
from contextlib import closing
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import GPipe
from profiler import AllocationTracker

from ..layers import DOUBLE, MODES, assert_same, gradients, linears, piped, rows
from ..schedules import ALONE, each_schedule

CLASSES, PAD = 3, -100


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "a mean": lambda mean: mean,
    "a part of a mean": lambda mean: -(0.5 * mean / torch.tensor(2.0)),
    "a mean in another form": lambda mean: mean.view(1).squeeze().double().mean(),
    "a mean with metrics": lambda mean: (mean, {"a": 1.0}),
}


@st.composite
def labels(draw: st.DrawFn) -> tuple[Tensor, list[float], int]:
    """Labels of rows of tokens, of which any number counts; a weight for each class; chunks."""
    length, count = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    flat = draw(st.lists(st.sampled_from([PAD, 0, 1, 2]), min_size=length * count, max_size=length * count))
    weights = draw(st.lists(st.floats(0.1, 10), min_size=CLASSES, max_size=CLASSES))
    return torch.tensor(flat).view(count, length), weights, draw(st.integers(1, 8))


def tokens(count: int, length: int) -> Tensor:
    return torch.randn(count, length, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))


@settings(max_examples=settings.default.max_examples // 2)
@given(
    labels(),
    st.sampled_from(ALONE),
    st.sampled_from(MODES),
    st.sampled_from(["a count", "a normalizer", *FORMS]),
    st.booleans(),
)
def test_ignored_tokens_and_weights_of_classes(
    case: tuple[Tensor, list[float], int], schedule: str, mode: str, told: str, weighted: bool
):
    """The count is seen in a mean, or comes with each micro-batch, or the caller knows it before; it may be 0 in some.

    Where nothing at all counts, the loss is nan and the gradients are zeros.
    """
    target, class_weights, chunks = case
    weight = torch.tensor(class_weights, dtype=DOUBLE) if weighted else None
    model, x = linears(), tokens(*target.shape)
    pipe = piped(model, [1, 2], chunks=chunks, checkpoint=mode)

    def total(logits: Tensor, target: Tensor, reduction: str = "sum") -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), weight, ignore_index=PAD, reduction=reduction)

    def mean(logits: Tensor, target: Tensor) -> Any:
        found = total(logits, target, "mean")
        return FORMS.get(told, FORMS["a mean"])(found)

    def count(target: Tensor) -> Tensor:
        kept = target[target != PAD]
        return torch.tensor(kept.numel()) if weight is None else weight[kept].sum()

    knows = told == "a normalizer" and bool(count(target))  # one of 0 is refused
    options: dict[str, Any] = {"reduction": "sum", "normalizer": count(target)} if knows else {}
    counted = (lambda logits, target: (total(logits, target), count(target))) if told == "a count" else mean
    with gpipe.inline():
        loss = pipe.step(x, target, loss_fn=total if knows else counted, schedule=schedule, **options)
    loss = loss[0] if told == "a mean with metrics" else loss
    expected = F.cross_entropy(model(x).flatten(0, 1), target.flatten(), weight, ignore_index=PAD)
    expected = -expected / 4 if told == "a part of a mean" else expected
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), equal_nan=True)
    assert_same(pipe, model)


def masked(logits: Tensor, target: Tensor) -> Tensor:
    kept = target != PAD
    return (F.cross_entropy(logits, target, reduction="none") * kept).sum() / kept.sum()


def masked_by_number(logits: Tensor, target: Tensor) -> Tensor:
    kept = target != PAD
    return (F.cross_entropy(logits, target, reduction="none") * kept).sum() / max(int(kept.sum()), 1)


def selected(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")[target != PAD].mean()


def two_means(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target) + logits.square().mean()


def rooted(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none").div(target.ne(PAD).sum()).sum()


@pytest.mark.parametrize("loss_fn", [masked, masked_by_number, selected, two_means, rooted])
@settings(max_examples=settings.default.max_examples // 4)
@given(st.lists(st.sampled_from([PAD, 0, 1, 2]), min_size=1, max_size=7), st.integers(1, 8), st.sampled_from(ALONE))
def test_a_loss_that_is_made_of_means_over_labels_is_that_of_all_rows_or_refused(
    loss_fn: Any, flat: list[int], chunks: int, schedule: str
):
    """It is known by what its micro-batches divide: where that is in proportion to the rows, it is a mean over rows."""
    target, x, model = torch.tensor(flat), rows(len(flat)), linears()
    pipe = piped(linears(), [1, 2], chunks=chunks)
    expected = loss_fn(model(x), target)
    counts = [int(part.ne(PAD).sum()) * len(flat) / len(part) for part in target.chunk(chunks)]
    with gpipe.inline():
        if len({*counts}) > 1:
            for method in (pipe.step, pipe.evaluate):
                with pytest.raises(ValueError, match=r"a mean over another number than rows.*the sum and the count"):
                    method(x, target, loss_fn=loss_fn)
            assert all(p.grad is None for p in pipe.parameters())
            return
        found = pipe.step(x, target, loss_fn=loss_fn, schedule=schedule)
    torch.testing.assert_close(found, expected.detach(), equal_nan=True)
    if expected.isfinite():
        expected.backward()
        assert_same(pipe, model)


@given(st.integers(1, 7), st.integers(1, 8), st.floats(0.5, 4))
def test_a_division_by_a_constant_is_none_by_a_count(count: int, chunks: int, temperature: float):
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output / torch.tensor(temperature), target) / torch.tensor(2.0)

    model, pipe = linears(), piped(linears(), [1, 2], chunks=chunks)
    expected = loss_fn(model(rows(count)), rows(count))
    torch.testing.assert_close(pipe.evaluate(rows(count), rows(count), loss_fn=loss_fn), expected.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_counted_loss_in_half_precision_overflows_where_the_sum_of_a_micro_batch_does(dtype: torch.dtype):
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return F.mse_loss(output, target, reduction="sum"), target.numel()

    model, x, y = linears().to(dtype), rows(8).to(dtype), torch.full((8, 3), 100.0, dtype=dtype)
    expected = F.mse_loss(model(x), y)
    expected.backward()
    for chunks, overflows in ((4, False), (1, dtype is torch.float16)):
        with closing(piped(linears().to(dtype), [1, 2], chunks=chunks)) as pipe:
            loss = pipe.step(x, y, loss_fn=loss_fn)
            torch.testing.assert_close(loss, expected.detach() / (0 if overflows else 1))
            torch.testing.assert_close(pipe.evaluate(x, y, loss_fn=loss_fn), loss)
            torch.testing.assert_close(gradients(pipe), gradients(model), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("count", [2, 2.0, True, torch.tensor(2), torch.tensor([[2.0]], dtype=DOUBLE)])
def test_counts_are_any_numbers(count: Any):
    model = linears()
    pipe = piped(model, [1, 2], chunks=3)
    loss = pipe.step(rows(), rows(), loss_fn=lambda o, t: (F.mse_loss(o, t, reduction="sum"), count))
    expected = F.mse_loss(model(rows()), rows(), reduction="sum") / (3 * int(count))
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert_same(pipe, model)


def test_loss_function_may_work_in_place_on_some_microbatches_only():
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if target[0, 0] == 6:  # the second micro-batch
            output.mul_(2)
        return output.square().mean()

    model = linears()
    pipe, x, targets = piped(model, [1, 2], chunks=3), rows(), torch.arange(18.0, dtype=DOUBLE).view(6, 3)
    pipe.step(x, targets, loss_fn=loss_fn)
    factors = torch.tensor([1, 1, 2, 2, 1, 1], dtype=DOUBLE)[:, None]
    (model(x) * factors).square().mean().backward()
    assert_same(pipe, model)


def measured(*metrics: Any) -> Callable[[Tensor, Tensor], Any]:
    """A loss with metrics, others for each second micro-batch."""
    turns = cycle(metrics)

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        found = next(turns)
        return F.mse_loss(output, target) if found is None else (F.mse_loss(output, target), found)

    return loss_fn


@pytest.mark.parametrize(
    ("loss_fn", "kind", "message"),
    [
        (lambda o, t: 3.0, TypeError, "returned float; expected a scalar tensor"),
        (lambda o, t: None, TypeError, "returned NoneType"),
        (lambda o, t: [o.sum()], TypeError, "returned list"),
        (lambda o, t: o - t, ValueError, r"shape \(2, 3\); expected a scalar: take its mean"),
        (lambda o, t: o.sum(0, keepdim=True)[:, :1], ValueError, r"shape \(1, 1\)"),
        (lambda o, t: (o.sum(1), 3), ValueError, r"shape \(2,\)"),
        (lambda o, t: o.detach().sum(), ValueError, "does not require grad"),
        (lambda o, t: (t.sum(), 3), ValueError, "does not require grad"),
        (lambda o, t: (o.sum(), 3, 4), ValueError, r"tuple of 3; expected a scalar loss, or \(sum, count\)"),
        (lambda o, t: (), ValueError, "tuple of 0"),
        (lambda o, t: (o + 1j).sum(), TypeError, r"complex128; expected a real scalar: take its \.real or \.abs"),
        (lambda o, t: ((o + 1j).sum(), 3), TypeError, "complex128"),
        (lambda o, t: (o.sum(), o.square().sum()), ValueError, r"count that requires grad.*count\.detach\(\)"),
        (lambda o, t: (o.sum(), torch.ones(3)), ValueError, r"count of shape \(3,\); expected one number"),
        (lambda o, t: (o.sum(), torch.ones(()) * 1j), TypeError, "count of torch.complex64; expected a real number"),
        (lambda o, t: (o.sum(), "3"), TypeError, "count of str; expected a real number"),
        (lambda o, t: (o.sum(), None), TypeError, "count of NoneType"),
        (measured({"a": "text"}), TypeError, r"metrics\['a'\] of loss_fn is of type str; expected a tensor or"),
        (measured({"a": {"b": 1}}), TypeError, r"metrics\['a'\] of loss_fn is of type dict; .* flattened"),
        (measured({"a": None}), TypeError, r"metrics\['a'\] of loss_fn is of type NoneType"),
        (measured({"a": torch.ones(3)}), ValueError, r"must have the same names .* its shapes are \(3,\)"),
        (measured({"a": torch.ones(2)}, {"a": torch.ones(4)}), ValueError, r"its shapes are \(\d,\), \(\d,\)"),
        (measured({"a": 1}, {"b": 1}), ValueError, "instead of a dict with the leaves"),
        (measured({"a": torch.ones(2)}, {"a": torch.ones(2).int()}), ValueError, "they may differ in rows only"),
        (measured(None, {"a": 1}), ValueError, "loss_fn returned metrics for some micro-batches only"),
        (measured({"a": 1}, None), ValueError, "loss_fn returned metrics for some micro-batches only"),
    ],
)
@each_schedule
def test_what_is_no_loss_is_refused_with_the_place(
    schedule: str, loss_fn: Any, kind: type[Exception], message: str
) -> None:
    pipe, model = piped(linears(), [1, 2], chunks=3), linears()
    with pytest.raises(kind, match=message) as caught:
        pipe.step(rows(), rows(), loss_fn=loss_fn, schedule=schedule)
    assert "in partition 1" in " ".join(caught.value.__notes__)
    assert all(p.grad is None for p in pipe.parameters())
    if "grad" not in message:
        with pytest.raises(kind, match=message):
            pipe.evaluate(rows(), rows(), loss_fn=loss_fn)
    pipe.step(rows(), rows(), loss_fn=F.mse_loss, schedule=schedule)
    F.mse_loss(model(rows()), rows()).backward()
    assert_same(pipe, model)


def test_a_count_beside_another_reduction_is_refused() -> None:
    pipe = piped(linears(), [1, 2], chunks=3)
    for method in (pipe.step, pipe.evaluate):
        with pytest.raises(ValueError, match=r"\(sum, count\).*beside reduction='sum'"):
            method(rows(), rows(), loss_fn=lambda o, t: ((o - t).sum(), len(t)), reduction="sum", normalizer=48)


@pytest.mark.parametrize("normalizer", [0, torch.tensor(0)])
def test_division_by_no_count_is_refused_before_anything_runs(normalizer: Any) -> None:
    pipe = piped(linears(), [1, 2], chunks=3)
    with pytest.raises(ValueError, match="normalizer must not be 0"):
        pipe.step(rows(), rows(), loss_fn=F.mse_loss, reduction="sum", normalizer=normalizer)
    assert all(p.grad is None for p in pipe.parameters())


def peak(chunks: int, schedule: str, mode: str) -> int:
    """The most bytes in a step with outputs of 32 KiB for each micro-batch, and little else."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 4096))
    pipe = GPipe(model, [2, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=mode)
    x, labels = torch.randn(2 * chunks, 3), torch.zeros(2 * chunks, dtype=torch.int64)
    with gpipe.inline():
        pipe.step(x, labels, loss_fn=F.cross_entropy, schedule=schedule)
        pipe.zero_grad()
        with AllocationTracker() as tracker:
            pipe.step(x, labels, loss_fn=F.cross_entropy, schedule=schedule)
    return tracker.peak


@each_schedule
@settings(max_examples=settings.default.max_examples // 10)
@given(few=st.integers(3, 6), more=st.integers(1, 12))
def test_what_losses_hold_does_not_grow_with_the_number_of_micro_batches(schedule: str, few: int, more: int) -> None:
    """Where the last stage is checkpointed the loss is computed when it is recomputed."""
    grown = peak(few + more, schedule, "always") - peak(few, schedule, "always")
    assert grown < 4096 * more
