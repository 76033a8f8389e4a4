"""What a loss function gives beside the loss comes back for the whole mini-batch."""

from contextlib import closing
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import gpipe

from ..layers import MODES, assert_same, linears, piped, rows
from ..schedules import ALONE


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

    with gpipe.inline() if inline else closing(pipe):
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
