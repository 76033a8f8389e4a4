"""A mini-batch is split like torch.chunk, unless a layer with statistics would get a single row."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from gpipe import DeferredBatchNorm, GPipe

from ..layers import DOUBLE, MODES, Layer, assert_same, linears, rows


def sizes_of(count: int, chunks: int, deferred: bool) -> list[int]:
    seen: list[int] = []
    layers = nn.Sequential(Layer(lambda s, x: s.seen.append(len(x)) or x * 1, seen=seen), *linears(2))
    pipe = GPipe(layers, [1, 2], devices=["cpu"] * 2, chunks=chunks, deferred_batch_norm=deferred)
    pipe.eval()(rows(count))
    return seen


@pytest.mark.parametrize(
    ("count", "chunks", "plain", "deferred"),
    [
        (10, 4, [3, 3, 3, 1], [3, 3, 2, 2]),
        (5, 4, [2, 2, 1], [3, 2]),
        (3, 2, [2, 1], [3]),
        (7, 4, [2, 2, 2, 1], [3, 2, 2]),
        (8, 4, [2, 2, 2, 2], [2, 2, 2, 2]),
        (3, 8, [1, 1, 1], [1, 1, 1]),
    ],
)
def test_deferred_batch_norm_avoids_single_rows(count: int, chunks: int, plain: list[int], deferred: list[int]) -> None:
    assert sizes_of(count, chunks, False) == plain
    assert sizes_of(count, chunks, True) == deferred


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(2, 12), st.integers(1, 6), st.sampled_from(MODES), st.booleans())
def test_statistics_match_mini_batch_for_any_rows(count: int, chunks: int, mode: str, converted: bool) -> None:
    """Torch's batch norm fails on a single row."""
    plain = nn.Sequential(linears(1)[0], nn.BatchNorm1d(3, dtype=DOUBLE), linears(2)[1])
    layers = copy.deepcopy(plain)
    if converted:
        layers = DeferredBatchNorm.convert_deferred_batch_norm(layers, chunks)
    pipe = GPipe(layers, [1, 2], devices=["cpu"] * 2, chunks=chunks, checkpoint=mode, deferred_batch_norm=not converted)
    target = rows(count)
    if -(-count // chunks) < 2:  # one row per micro-batch, as requested
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            pipe.step(rows(count), target, loss_fn=F.mse_loss)
        return
    pipe.step(rows(count), target, loss_fn=F.mse_loss)
    plain(rows(count))
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(pipe[1], name), getattr(plain[1], name))
    plain.eval(), pipe.eval()
    pipe.zero_grad()
    pipe.step(rows(count), target, loss_fn=F.mse_loss)
    F.mse_loss(plain(rows(count)), target).backward()
    assert_same(pipe, plain)
