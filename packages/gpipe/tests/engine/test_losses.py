"""The loss of the whole mini-batch, and what comes with it, from a step and from ``evaluate()``."""

import copy
import weakref
from contextlib import AbstractContextManager, closing
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import GPipe

from ..layers import DOUBLE, MODES, assert_same, linears, piped, rows
from ..schedules import ALONE


def total(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="sum")


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {"loss_fn": F.mse_loss},
    "sum": {"loss_fn": total, "reduction": "sum", "normalizer": 5},
    "counted": {"loss_fn": lambda output, target: (total(output, target), output.numel())},
    "metrics": {"loss_fn": lambda output, target: (F.mse_loss(output, target), {"each": (output - target).sum(1)})},
    "random": {"loss_fn": lambda output, target: F.mse_loss(F.dropout(output), target)},
}


def model(dropout: bool) -> nn.Sequential:
    first, second, third = linears()
    return nn.Sequential(first, nn.Dropout(0.5 if dropout else 0.0), second, nn.BatchNorm1d(3, dtype=DOUBLE), third)


def way(pipe: GPipe, inline: bool) -> AbstractContextManager[Any]:
    return gpipe.inline() if inline else closing(pipe)


@settings(max_examples=settings.default.max_examples // 3)
@given(
    st.integers(2, 3), st.integers(1, 4), st.sampled_from(sorted(LOSSES)), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(ALONE), st.sampled_from(MODES), st.booleans(),
)  # fmt: skip
def test_it_gives_what_a_step_would_give(
    each: int,
    chunks: int,
    loss: str,
    training: bool,
    inline: bool,
    outputs: bool,
    schedule: str,
    mode: str,
    drops: bool,
):
    """In the mode that the layers are in, with the same random numbers."""
    count = each * chunks
    options: dict[str, Any] = {**LOSSES[loss], "return_outputs": outputs}
    pipe = piped(model(drops), [2, 1, 2], chunks=chunks, checkpoint=mode).train(training)
    twin = copy.deepcopy(pipe)
    before = copy.deepcopy(pipe.state_dict())
    with way(pipe, inline):
        for _ in range(2):
            torch.manual_seed(3)
            found = pipe.evaluate(rows(count), rows(count), **options)
    if not training:
        torch.testing.assert_close(pipe.state_dict(), before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    assert pipe.training is training
    with way(twin, inline):
        torch.manual_seed(3)
        expected = twin.step(rows(count), rows(count), schedule=schedule, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not any(t.requires_grad for t in torch.utils._pytree.tree_leaves(found))


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("grad", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_no_output_outlives_its_loss(inline: bool, grad: Any):
    """At most one is there at a time, whatever the number of micro-batches."""
    pipe = piped(linears(), [1, 2], chunks=6)
    alive: list[weakref.ref[Tensor]] = []
    most = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert not output.requires_grad
        assert not torch.is_grad_enabled()
        most.append(sum(each() is not None for each in alive))
        alive.append(weakref.ref(output.untyped_storage()))
        return F.mse_loss(output, target)

    with way(pipe, inline), grad():
        loss = pipe.evaluate(rows(6, grad=True), rows(6), loss_fn=loss_fn)
    torch.testing.assert_close(loss, F.mse_loss(linears()(rows(6)), rows(6)).detach())
    assert len(most) == 6
    assert max(most) == 0


def test_a_loss_need_not_be_differentiable():
    pipe, plain = piped(linears(), [1, 2], chunks=3), linears()
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0])

    def right(output: Tensor, target: Tensor) -> Any:
        return (output.argmax(1) == target).sum(), len(target)

    accuracy = pipe.evaluate(rows(7), labels, loss_fn=right)
    torch.testing.assert_close(accuracy.item(), (plain(rows(7)).argmax(1) == labels).double().mean().item())
    with pytest.raises(ValueError, match=r"does not require grad.*use pipe\.evaluate"):
        pipe.step(rows(7), labels, loss_fn=right)


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
    seen: list[list[float]] = []

    def once(output: Tensor, target: Tensor) -> Any:
        """Also where the last stage is checkpointed: then when it is recomputed."""
        assert not gpipe.is_checkpointing()
        assert not gpipe.is_recomputing()
        seen.append(target[:, 0].tolist())
        return loss_fn(output, target)

    with way(pipe, inline):
        found = pipe.step(rows(count), rows(count), loss_fn=once, schedule=schedule, return_outputs=outputs)
        assert sorted(seen) == sorted(part[:, 0].tolist() for part in rows(count).chunk(chunks))
        again = pipe.evaluate(rows(count), rows(count), loss_fn=loss_fn, return_outputs=outputs)
    for each in (found, again):
        assert isinstance(each, tuple)
        assert list(each[1]) == list(expected[1])
        torch.testing.assert_close(each, expected, check_dtype=False)
        assert each[1]["mean"].dtype == expected[1]["mean"].dtype
        assert not any(t.requires_grad for t in torch.utils._pytree.tree_leaves(each) if isinstance(t, Tensor))
    assert_same(pipe, plain)
