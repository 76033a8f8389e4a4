"""``evaluate()`` gives the loss that a step would give, keeps nothing, and leaves everything as it was."""

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

from ..layers import DOUBLE, MODES, linears, piped, rows
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
