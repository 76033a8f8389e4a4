"""Blocks of models that are recomputed on their own: they hold less, and repeat what they did."""

import copy
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import GPipe, record

from ..layers import DOUBLE, Call, Layer, Row, assert_same, linears, piped, rows, running

each_way = pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])


def pipe_of(*layers: nn.Module, balance: list[int] | None = None, checkpoint: str = "always", chunks: int = 2) -> GPipe:
    sizes, names = balance or [len(layers)], [f"layers.{k}" for k in range(len(layers))]
    devices = ["cpu"] * len(sizes)
    return GPipe(Row(*layers), sizes, devices=devices, blocks=names, chunks=chunks, checkpoint=checkpoint)


@pytest.mark.parametrize(("activation", "saved"), [(nn.GELU, 2), (nn.Tanh, 1)], ids=["input", "output"])
def test_checkpointing_frees_saved_tensors_of_blocks(activation: type[nn.Module], saved: int):
    """An operation may save its output. Memory includes tensors saved by recomputations, until the last backward."""

    def held(count: int, checkpoint: str) -> int:
        parts = lambda: nn.Sequential(nn.Linear(64, 256), activation(), nn.Linear(256, 64))  # noqa: E731
        layers = [Layer(lambda s, x: s.m[0](x), parts()) for _ in range(count)]
        with closing(pipe_of(*layers, checkpoint=checkpoint, chunks=4)) as pipe, gpipe.inline():
            x, y = torch.zeros(64, 64), torch.zeros(64, 64)
            options: Any = {"loss_fn": F.mse_loss, "reduction": "mean", "schedule": "fill_drain"}
            pipe.step(x, y, **options)
            with record(memory=True) as timeline:
                pipe.step(x, y, **options)
        return timeline.peak_bytes[0]

    layer, inner = saved * 16 * 256 * 4, 16 * 64 * 4  # what 16 rows save in a block, and between two blocks
    for checkpoint, each in (("never", 4 * (layer + inner)), ("always", 4 * inner)):
        counts = [held(count, checkpoint) for count in (2, 3, 4)]
        assert [b - a for a, b in pairwise(counts)] == pytest.approx([each, each], rel=0.07)


@each_way
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_recomputation_repeats_phase_and_private_generators(checkpoint: str, inline: bool):
    seen: list[list[tuple[bool, bool, float]]] = [[] for _ in range(3)]

    def noisy(k: int, own: torch.Generator) -> nn.Module:
        def act(x: Tensor) -> Tensor:
            noise = torch.rand((), generator=own)
            seen[k].append((gpipe.is_checkpointing(), gpipe.is_recomputing(), noise.item()))
            return (x * noise).tanh()

        return Call(act)

    layers = [noisy(k, torch.Generator().manual_seed(k)) for k in range(3)]
    with closing(pipe_of(*layers, checkpoint=checkpoint, chunks=1)) as pipe, running(inline):
        pipe(rows(grad=True)).sum().backward()
    expected = [(True, False), (False, True)] if checkpoint == "always" else [(False, False)]
    for calls in seen:
        assert [call[:2] for call in calls] == expected
        assert len({noise for *_, noise in calls}) == 1


@pytest.mark.parametrize("call", [1, 2])
@each_way
def test_failed_run_resets_phase(call: int, inline: bool):
    seen, calls = list[tuple[bool, bool]](), iter(range(1, 9))

    def act(x: Tensor) -> Tensor:
        assert next(calls) != call
        seen.append((gpipe.is_checkpointing(), gpipe.is_recomputing()))
        return x.sin()

    with closing(pipe_of(Call(act), *linears(1), chunks=1)) as pipe:
        with running(inline), pytest.raises(AssertionError):
            pipe(rows(grad=True)).sum().backward()
        with running(inline), torch.no_grad():
            pipe(rows())
    assert seen[-1] == (False, False)


def counts(s: Layer, x: Tensor) -> Tensor:
    """The result depends on the number of calls, which cannot be reset."""
    s.calls.append(None)
    return (x * len(s.calls)).sin()


def saves_more(s: Layer, x: Tensor) -> Tensor:
    """Return the same result each time, but with different operations."""
    s.calls.append(None)
    return x.sin() if len(s.calls) < 2 else x.sin() + (x * x) * 0


@each_way
@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([Layer(counts, calls=[])], "gave another output"),
        ([Layer(saves_more, calls=[])], "did other operations"),
        ([Call(lambda x: x.sigmoid().mul_(2))], "modified by an inplace operation"),
    ],
    ids=["other output", "other operations", "in place"],
)
def test_what_cannot_be_repeated_is_refused(layers: list[nn.Module], says: str, inline: bool):
    layers = [*copy.deepcopy(layers), nn.Linear(3, 3, dtype=DOUBLE)]
    with closing(pipe_of(*layers)) as pipe, running(inline), pytest.raises(RuntimeError, match=says):
        pipe.step(rows(4, grad=True), rows(4), loss_fn=F.mse_loss, reduction="mean")


def test_pipe_inside_checkpointed_layer_raises():
    inner = piped(linears(2), [1, 1], checkpoint="never")
    pipe = pipe_of(inner, *linears(2), balance=[2, 1])
    with closing(inner), closing(pipe), pytest.raises(RuntimeError, match="computes on other threads"):
        pipe.step(rows(4), rows(4), loss_fn=F.mse_loss, reduction="mean")


def test_derivatives_inside_of_a_checkpointed_layer_are_refused():
    """torch.func cannot save tensors by hooks."""
    slope: Callable[[Tensor], Tensor] = torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))
    with closing(pipe_of(Call(slope), *linears(2), balance=[2, 1])) as pipe:
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            pipe.step(rows(4), rows(4), loss_fn=F.mse_loss, reduction="mean")
        pipe.checkpoint = "never"
        pipe.step(rows(4), rows(4), loss_fn=F.mse_loss, reduction="mean")


def test_in_place_block_with_aliased_inputs():
    """Separate copies saved for recomputation would not share in-place changes."""
    last = nn.Linear(3, 3, dtype=DOUBLE)
    twice = Layer(lambda s, x: (y := s.m[0](x), y.view_as(y)), linears(1))
    changes = Layer(lambda s, pair: s.m[0](pair[0].mul_(2) * pair[1].tanh()), last)
    plain = Row(twice, changes)
    with closing(pipe_of(twice, changes)) as pipe:
        pipe(rows()).sum().backward()
        plain(rows()).sum().backward()
        assert_same(pipe, plain)


class Attending(nn.Module):
    """Blocks of attention, called with the same tensor once, twice or three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(4, 2, batch_first=True, dtype=DOUBLE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = x.tanh()
        for layer, (query, value) in zip(self.layers, ((x, x), (x, kept), (kept, kept)), strict=True):
            x = x + layer(query, kept if value is kept else query, value, need_weights=False)[0]
        return x


@pytest.mark.parametrize("trains", [True, False])
def test_recomputation_gets_the_same_tensor_several_times(trains: bool):
    model = Attending().train(trains)
    pipe = GPipe(copy.deepcopy(model), devices=["cpu"] * 2, chunks=2, checkpoint="always")
    x = torch.rand(4, 5, 4, dtype=DOUBLE, requires_grad=True)
    with closing(pipe):
        for each in (pipe, model):
            each(x).square().sum().backward()
        assert_same(pipe, model)
