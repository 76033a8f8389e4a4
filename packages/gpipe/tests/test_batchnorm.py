"""Deferred batch norm: running statistics are updated once per mini-batch, for any split and mode."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from gpipe import DeferredBatchNorm, GPipe, inline
from gpipe.schedule import Schedule

from .layers import MODES, Layer

SHAPES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (2, 3), nn.BatchNorm3d: (2, 1, 2)}


@st.composite
def norms(draw: st.DrawFn) -> tuple[nn.Module, list[Tensor]]:
    """A batch norm of any kind, and some mini-batches for it, short ones among them."""
    kind = draw(st.sampled_from(sorted(SHAPES, key=str)))
    momentum = draw(st.sampled_from([0.1, 0.5, 1.0, 0.0, None]))
    norm = kind(3, momentum=momentum, affine=draw(st.booleans()), eps=draw(st.sampled_from([1e-5, 0.1]))).double()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    counts = draw(st.lists(st.integers(4, 12), min_size=1, max_size=3))
    scale, shift = draw(st.sampled_from([(1, 0), (100, 1000), (1e-3, -5)]))
    return norm, [
        torch.randn(n, 3, *SHAPES[kind], generator=generator, dtype=torch.float64) * scale + shift for n in counts
    ]


@given(norms(), st.integers(1, 4), st.sampled_from(MODES))
def test_statistics_are_those_of_the_whole_mini_batch(problem: tuple[nn.Module, list[Tensor]], chunks: int, mode: str):
    plain, batches = problem
    if any(len(part) == 1 and part[0][0].numel() == 1 for x in batches for part in x.chunk(chunks)):
        chunks = 1  # the variance of one value per channel is undefined
    pipe = GPipe(
        nn.Sequential(copy.deepcopy(plain)),
        [1],
        devices=["cpu"],
        chunks=chunks,
        checkpoint=mode,
        deferred_batch_norm=True,
    )
    for x in batches:
        plain(x)
        pipe(x.clone().requires_grad_()).sum().backward()
        assert_same_statistics(pipe[0], plain)
    pipe.close()


def repeated(s: Layer, x: Tensor) -> Tensor:
    """Call batch norm a number of times given by the input's first element, perhaps in a nested checkpoint."""

    def norm(y: Tensor) -> Tensor:
        return s.m[0](y) * 2 + 1

    for _ in range(int(x.detach().flatten()[0])):
        x = norm(x) if s.nested == "none" else checkpoint(norm, x, use_reentrant=s.nested == "reentrant")
    return x


@st.composite
def orders(draw: st.DrawFn, microbatches: int, stages: int) -> Schedule | str:
    """Draw a schedule: a named one, or one with forwards in any order, the same in all stages."""
    if draw(st.booleans()):
        return draw(st.sampled_from(["1f1b", "fill_drain", "zero_bubble"]))
    order = draw(st.permutations(range(microbatches)))
    line = " ".join([*(f"F{i}" for i in order), *(f"B{i}" for i in reversed(order))])
    return Schedule.parse("\n".join([line] * stages))


@given(st.data())
def test_whatever_calls_the_layer_and_in_whichever_order(data: st.DataObject):
    calls = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    schedule, mode = data.draw(orders(len(calls), 2)), data.draw(st.sampled_from(MODES))
    nested = data.draw(st.sampled_from(["none", "reentrant", "not reentrant"]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    parts = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in calls]
    for part, times in zip(parts, calls, strict=True):
        part[0, 0] = times + 0.5
    plain = nn.BatchNorm1d(4, momentum=data.draw(st.sampled_from([0.1, None]))).double()
    model = nn.Sequential(Layer(repeated, copy.deepcopy(plain), nested=nested), nn.Linear(4, 4).double())
    pipe = GPipe(model, [1, 1], devices=["cpu"] * 2, chunks=len(calls), checkpoint=mode, deferred_batch_norm=True)
    x = torch.cat(parts).requires_grad_()
    with inline():
        pipe.step(x, loss_fn=lambda y, _: y.square().mean(), reduction="mean", schedule=schedule)
    for call in range(max(calls)):
        plain(torch.cat([each[call] for part in parts for each in [_inputs(part)] if call < len(each)]))
    assert_same_statistics(pipe[0].m[0], plain)


def _inputs(x: Tensor) -> list[Tensor]:
    """Return the inputs of the batch norm calls in :func:`repeated`."""
    inputs = [x]
    for _ in range(int(x.flatten()[0])):
        inputs.append(nn.functional.batch_norm(inputs[-1], None, None, training=True) * 2 + 1)
    return inputs[:-1]


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("rows", [(0, 4), (4, 0), (3, 0, 4), (0, 0)])
def test_micro_batches_without_rows_add_nothing(rows: tuple[int, ...], alone: bool, momentum: float | None):
    """A layer drops every row of some micro-batches. torch counts an empty batch, and does not change statistics."""
    kept = torch.arange(4).repeat(len(rows)) < torch.tensor(rows).repeat_interleave(4)
    x = torch.cat([kept[:, None].double(), torch.randn(len(kept), 2, dtype=torch.float64)], 1)
    model = nn.Sequential(Layer(lambda _, x: x[x[:, 0] > 0, 1:]), nn.BatchNorm1d(2, momentum=momentum).double())
    plain, deferred = copy.deepcopy(model), DeferredBatchNorm.convert_deferred_batch_norm(model, len(rows))
    run = deferred if alone else GPipe(deferred, [1, 1], devices=["cpu"] * 2, chunks=len(rows))
    for _ in range(2):
        plain(x)
        if alone:
            for part in x.chunk(len(rows)):
                run(part)
        else:
            run.step(x, loss_fn=lambda output: output.square().sum(), reduction="sum")
        assert_same_statistics(deferred[1], plain[1])


def test_standalone_mini_batch_is_chunks_forwards():
    plain, x = nn.BatchNorm1d(3), torch.randn(12, 3)
    deferred = DeferredBatchNorm.convert_deferred_batch_norm(copy.deepcopy(plain), 4)
    before = deferred.running_mean.clone()
    for part in x.chunk(4)[:3]:
        deferred(part)
    assert torch.equal(deferred.running_mean, before)
    deferred(x.chunk(4)[3])
    plain(x)
    assert_same_statistics(deferred, plain)


def test_conversion_preserves_state_and_other_layers():
    model = nn.Sequential(
        nn.Sequential(nn.BatchNorm2d(4, momentum=0.3, eps=0.1), nn.SyncBatchNorm(4)),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.LazyBatchNorm1d(),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.BatchNorm3d(4, affine=False).eval(),
    )
    model[0][0].weight.requires_grad_(False)
    kept = [model[0][1], model[1], model[2], model[3]]
    weight, mean = model[0][0].weight, model[0][0].running_mean
    converted = DeferredBatchNorm.convert_deferred_batch_norm(model, chunks=3)
    first = converted[0][0]
    assert converted is model
    assert [converted[0][1], *converted[1:4]] == kept
    assert isinstance(first, DeferredBatchNorm)
    assert isinstance(first, nn.BatchNorm2d)
    assert (first.momentum, first.eps, first.chunks, first.training) == (0.3, 0.1, 3, True)
    assert first.weight is weight
    assert first.running_mean is mean
    assert not first.weight.requires_grad
    assert isinstance(converted[4], DeferredBatchNorm)
    assert isinstance(converted[4], nn.BatchNorm3d)
    assert not converted[4].training
    assert converted[4].weight is None
    again = DeferredBatchNorm.convert_deferred_batch_norm(model, chunks=5)
    assert again[0][0] is first
    assert first.chunks == 5


def test_large_mean_costs_no_precision():
    """Sums of squares would lose it: in single precision, a variance of one is below the resolution of 1e4²."""
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)) + 1e4
    plain, deferred = nn.BatchNorm1d(3, momentum=1.0).double(), DeferredBatchNorm(3, momentum=1.0, chunks=8)
    plain(x.double())
    for part in x.chunk(8):
        deferred(part)
    torch.testing.assert_close(deferred.running_var.double(), plain.running_var, rtol=1e-3, atol=0)


def assert_same_statistics(found: nn.Module, expected: nn.Module) -> None:
    assert dict(found.named_buffers()).keys() == dict(expected.named_buffers()).keys()
    for (name, ours), theirs in zip(found.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")


class Shifted(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def hooked(register: str) -> nn.Module:
    norm = nn.BatchNorm1d(3)
    getattr(norm, register)(lambda *_: None)
    return norm


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "a custom forward": lambda: Shifted(3),
    "hooks": lambda: hooked("register_forward_hook"),
    "hooks, before": lambda: hooked("register_forward_pre_hook"),
    "hooks, backward": lambda: hooked("register_full_backward_hook"),
    "parametrizations": lambda: register_parametrization(nn.BatchNorm1d(3), "weight", Layer(lambda s, w: w * w)),
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_unsupported_batch_norm_raises_without_changes(what: str):
    first, unusual = nn.BatchNorm1d(3), UNUSUAL[what]()
    model = nn.Sequential(first, nn.Sequential(unusual))
    with pytest.raises(ValueError, match=what.partition(",")[0]):
        DeferredBatchNorm.convert_deferred_batch_norm(model)
    with pytest.raises(ValueError, match=what.partition(",")[0]):
        GPipe(model, [1, 1], devices=["cpu"] * 2, deferred_batch_norm=True)
    assert model[0] is first
    assert model[1][0] is unusual


class Stemmed(nn.Module):
    """A model with a batch norm at ``place``, which names a layer with copies of the norm, or the norm itself."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(3, 3), self._norm(place == "stem.1"))
        self.norm = self._norm(place == "norm")
        self.blocks = nn.ModuleList(
            self._norm(place == "blocks.0")
            if place.startswith("blocks")
            else Layer(lambda s, x: s.m[0](x).tanh(), nn.Linear(3, 3))
            for _ in range(3)
        )

    @staticmethod
    def _norm(is_there: bool) -> nn.Module:
        return nn.BatchNorm1d(3) if is_there else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("place", ["stem.1", "norm", "blocks.0"])
def test_batch_norms_are_deferred_anywhere(place: str) -> None:
    model, x = Stemmed(place), torch.randn(8, 3)
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [1, 2], devices=["cpu"] * 2, chunks=2, blocks="blocks", deferred_batch_norm=True)
    for frozen in (False, True):
        if frozen:
            for each in (*pipe.modules(), *plain.modules()):
                each.train(not isinstance(each, nn.BatchNorm1d))
        pipe.step(x, loss_fn=lambda output: output.square().mean(), reduction="mean")
        plain(x)
        assert_same_statistics(pipe.get_submodule(place), plain.get_submodule(place))


@pytest.mark.parametrize("mode", MODES)
def test_nested_pipe_counts_mini_batch_once(mode: str) -> None:
    """A mini-batch of the inner pipe is a micro-batch of the outer one. Recomputation is not counted."""
    inner = GPipe(nn.Sequential(nn.BatchNorm1d(3)), [1], devices=["cpu"], chunks=2, deferred_batch_norm=True)
    outer = GPipe(nn.Sequential(nn.Linear(3, 3), inner), [2], devices=["cpu"], chunks=3, checkpoint=mode)
    outer(torch.randn(12, 3)).sum().backward()
    assert inner[0].num_batches_tracked == 3
