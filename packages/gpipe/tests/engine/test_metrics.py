"""What a loss function gives beside the loss comes back for the whole mini-batch."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import gpipe

from ..layers import MODES, assert_same, linears, piped, rows
from ..schedules import ALONE

each_schedule = pytest.mark.parametrize("schedule", ALONE)


def metrics_of(output: Tensor, target: Tensor) -> dict[str, Any]:
    each = (output - target).square().mean(1)
    return {
        "rows": each,
        "tokens": output.flatten(),
        "mean": each.mean(),
        "share": (each > 1).sum() / len(each),
        "number": each.mean().item(),
    }


def mean(output: Tensor, target: Tensor) -> Any:
    return F.mse_loss(output, target), metrics_of(output, target)


def counted(output: Tensor, target: Tensor) -> Any:
    return (output - target).square().sum(), output.numel(), metrics_of(output, target)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.integers(1, 9), st.integers(1, 5), st.sampled_from(ALONE),
    st.sampled_from(MODES), st.sampled_from([mean, counted]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_metrics_are_those_of_the_whole_mini_batch(
    count: int, chunks: int, schedule: str, mode: str, loss_fn: Any, inline: bool, outputs: bool
):
    plain = linears()
    pipe = piped(plain, [1, 2], chunks=chunks, checkpoint=mode)
    output = plain(rows(count))
    F.mse_loss(output, rows(count)).backward()
    expected = (F.mse_loss(output, rows(count)), metrics_of(output, rows(count)), *([output] if outputs else []))
    expected = torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, expected)
    with gpipe.inline() if inline else closing(pipe):
        found = pipe.step(rows(count), rows(count), loss_fn=loss_fn, schedule=schedule, return_outputs=outputs)
        again = pipe.evaluate(rows(count), rows(count), loss_fn=loss_fn, return_outputs=outputs)
    for each in (found, again):
        assert isinstance(each, tuple)
        assert list(each[1]) == list(expected[1])
        torch.testing.assert_close(each, expected, check_dtype=False)
        assert not any(t.requires_grad for t in torch.utils._pytree.tree_leaves(each) if isinstance(t, Tensor))
    assert_same(pipe, plain)


class Varying:
    """Gives something else for the second micro-batch that it sees."""

    def __init__(self, *metrics: Any) -> None:
        self.metrics = list(metrics)

    def __call__(self, output: Tensor) -> Any:
        metrics = self.metrics[0]
        self.metrics = self.metrics[1:] or self.metrics
        return output.square().mean() if metrics is None else (output.square().mean(), metrics)


@pytest.mark.parametrize(
    ("metrics", "kind", "message"),
    [
        ([{"a": "text"}], TypeError, r"metrics\['a'\] of loss_fn is of type str; expected a tensor or a number"),
        ([{"a": {"b": 1}}], TypeError, r"metrics\['a'\] of loss_fn is of type dict; .* has to be flattened"),
        ([{"a": None}], TypeError, r"metrics\['a'\] of loss_fn is of type NoneType"),
        ([{"a": torch.ones(3)}], ValueError, r"must have the same names .* its shapes are \(3,\)"),
        ([{"a": torch.ones(2)}, {"a": torch.ones(4)}], ValueError, r"its shapes are \(\d,\), \(\d,\)"),
        ([{"a": 1}, {"b": 1}], ValueError, "instead of a dict with the leaves"),
        ([{"a": torch.ones(2)}, {"a": torch.ones(2).int()}], ValueError, "they may differ in rows only"),
        ([None, {"a": 1}], ValueError, "loss_fn returned metrics for some micro-batches only"),
        ([{"a": 1}, None], ValueError, "loss_fn returned metrics for some micro-batches only"),
    ],
)
@each_schedule
def test_bad_metrics_are_refused_before_the_step_is_done(
    schedule: str, metrics: list[Any], kind: type[Exception], message: str
) -> None:
    pipe, plain = piped(linears(), [1, 2], chunks=3), linears()
    with pytest.raises(kind, match=message) as caught:
        pipe.step(rows(), loss_fn=Varying(*metrics), schedule=schedule)
    assert "in partition 1" in " ".join(caught.value.__notes__)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    with pytest.raises(kind, match=message):
        pipe.evaluate(rows(), loss_fn=Varying(*metrics))
    pipe.step(rows(), loss_fn=lambda output: output.square().mean(), schedule=schedule)
    plain(rows()).square().mean().backward()
    assert_same(pipe, plain)
