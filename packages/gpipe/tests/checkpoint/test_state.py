"""Layers that remember what they saw: a pipe is the plain loop over micro-batches, or refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipe
from gpipe import GPipe, is_recomputing

from ..layers import DOUBLE, MODES, assert_same, linears, rows

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = ("fill_drain", "1f1b", "zero_bubble")
WAYS = (None, *SCHEDULES)
"""Without a schedule: forward and backward of the whole mini-batch."""


class Starting(nn.Module):
    """Does something else from the micro-batch on that is the ``start``-th, counted by a buffer."""

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.start = start
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.act(x, begun=int(self.seen) > self.start)

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        raise NotImplementedError


class Average(Starting):
    """A running average, moved in place."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.register_buffer("mean", torch.ones((), dtype=DOUBLE))

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        output = x * self.mean.clone()
        if begun:
            self.move(0.5 * self.mean + x.detach().mean())
        return output

    def move(self, fresh: Tensor) -> None:
        self.mean.copy_(fresh)


class Replaced(Average):
    def move(self, fresh: Tensor) -> None:
        self.mean = fresh


class ByNumPy(Average):
    """Changes values, and no version."""

    def move(self, fresh: Tensor) -> None:
        self.mean.numpy()[...] = fresh.numpy()


class Large(Average):
    """More than is copied just in case."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.mean = torch.ones(5000, dtype=DOUBLE)

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        output = x * self.mean[7].clone()
        if begun:
            self.mean.mul_(0.9)
        return output


class Statistics(Starting):
    """Batch norm by hand, whose kernel changes buffers and no version."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.register_buffer("mean", torch.zeros(3, dtype=DOUBLE))
        self.register_buffer("var", torch.ones(3, dtype=DOUBLE))

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.var, training=True) if begun else x * 1


class Attribute(Starting):
    """Keeps a number."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.factor = 1.0

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        output = x * self.factor
        if begun:
            self.factor *= 0.8
        return output


class Hidden(Starting):
    """Keeps a tensor that is no buffer: as a recurrent network does between its calls."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.h: Tensor | None = None

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        h = x if self.h is None else x * self.h.mean() + x
        self.h = h.detach() if begun else None
        return h


class InPlaceAttribute(Starting):
    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.total = torch.zeros(3, dtype=DOUBLE)

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        if begun:
            self.total += x.detach().mean(0)
        return x * self.total.clone() + x


class Closure(Starting):
    """Keeps a number where nobody can look."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.list = [0]

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        self.list[0] += begun
        return x * (1 + self.list[0])


class Polite(Closure):
    """Counts unless it is a recomputation."""

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        now = self.list[0]
        if not is_recomputing():
            self.list[0] += begun
        return x * 2 + 0 * now


class Decaying(Starting):
    """Changes its own weight."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.inner = linears(1)[0]

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        if begun:
            with torch.no_grad():
                self.inner.weight.mul_(0.9)
        return self.inner(x)


class Momentum(Starting):
    """Moves an average of its weight, which is a buffer."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.inner, self.average = linears(1)[0], self.averaged(torch.zeros(3, 3, dtype=DOUBLE))

    def averaged(self, zeros: Tensor) -> Tensor:
        return nn.Buffer(zeros)

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.inner.weight, 0.1 if begun else 0.0)
            target = x @ self.average
        return self.inner(x) + target


class MomentumOfParameter(Momentum):
    """The same, where it is a parameter that is not trained."""

    def averaged(self, zeros: Tensor) -> Tensor:
        return nn.Parameter(zeros, requires_grad=False)


class Bag(Starting):
    """Renormalises the weights that it looks up."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.inner = nn.Embedding(9, 3, max_norm=0.5, dtype=DOUBLE)
        with torch.no_grad():
            self.inner.weight.copy_(torch.arange(27, dtype=DOUBLE).sin().view(9, 3))

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        indices = x.detach().abs().mul(4).long().clamp(0, 8)
        return self.inner(indices).sum(1) * x


class Noise(Starting):
    """Draws from a generator of its own."""

    def __init__(self, start: int = 0) -> None:
        super().__init__(start)
        self.generator = torch.Generator().manual_seed(1)

    def act(self, x: Tensor, *, begun: bool) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator, dtype=DOUBLE) if begun else x * 1

    def __deepcopy__(self, memo: Any) -> Noise:
        twin = type(self)(self.start)
        twin.load_state_dict(self.state_dict())
        return twin


class Again(nn.Module):
    """Calls a layer more than once in a forward."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__()
        self.layer = layer
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x)
        return x


WORKING = (Average, Replaced, Statistics, Polite, Noise, Momentum)
"""Those that are right whenever they begin, in all modes."""
KEEPING = (Attribute, Hidden, InPlaceAttribute, Decaying, Large, Bag, MomentumOfParameter)
"""Those whose graph is kept; they are refused if they begin after the first micro-batch of a run."""
REMEMBERING = (*WORKING, *KEEPING, ByNumPy, Closure)


def loop(model: nn.Module, x: Tensor, chunks: int) -> list[Tensor]:
    """The oracle: forward and backward of one micro-batch after the other."""
    outputs = []
    for chunk in x.chunk(chunks):
        output = model(chunk)
        output.square().sum().backward()
        outputs.append(output.detach())
    return outputs


def squares(output: Tensor, _: Any) -> Tensor:
    return output.square().sum()


def train(pipe: GPipe, x: Tensor, way: str | None) -> Tensor:
    if way is not None:
        return pipe.step(x, loss_fn=squares, schedule=way, reduction="sum", return_outputs=True)[1]
    output = pipe(x)
    output.square().sum().backward()
    return output.detach()


def assert_state_alike(pipe: nn.Module, model: nn.Module) -> None:
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(model.named_buffers()))
    torch.testing.assert_close(dict(pipe.named_parameters()), dict(model.named_parameters()))
    for ours, theirs in zip(pipe.modules(), model.modules(), strict=True):
        for name in ("factor", "h", "total"):
            torch.testing.assert_close(getattr(ours, name, None), getattr(theirs, name, None), msg=name)


def live(
    layer: nn.Module, *, mode: str, way: str | None, inline: bool, early: bool, chunks: int, runs: int, times: int = 1
) -> int:
    """Train a pipe and the plain model; the run in which the pipe refused, or ``runs``."""
    first, last = linears(2)
    layers = [first, layer if times == 1 else Again(layer, times), nn.Tanh(), last]
    model = nn.Sequential(*layers)
    pipe = GPipe(copy.deepcopy(model), [3, 1] if early else [1, 3], devices=["cpu"] * 2, chunks=chunks, checkpoint=mode)
    with gpipe.inline() if inline else nullcontext():
        for run in range(runs):
            x = rows(2 * chunks) * (run + 1)
            try:
                output = train(pipe, x, way)
            except RuntimeError as refusal:
                text = str(refusal)
                assert "checkpoint='never'" in text or "inplace" in text
                return run
            torch.testing.assert_close(output, torch.cat(loop(model, x, chunks)))
            assert_same(pipe, model)
            assert_state_alike(pipe, model)
    return runs


@settings(max_examples=settings.default.max_examples // 2)
@given(
    layer=st.sampled_from(REMEMBERING),
    start=st.integers(0, 9),
    mode=st.sampled_from(MODES),
    way=st.sampled_from(WAYS),
    inline=st.booleans(),
    early=st.booleans(),
    chunks=st.integers(1, 4),
    times=st.integers(1, 3),
)
def test_equal_or_refused(layer: Callable[[int], nn.Module], start: int, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPIPE_CHECK", str(int(layer is Closure)))
        live(layer(start), **options, runs=4)


@pytest.mark.parametrize("layer", WORKING)
@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("way", [None, "1f1b"])
def test_what_shows_in_small_buffers_works(
    layer: Callable[[int], nn.Module], mode: str, way: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    for start, inline in [(3, False), (0, False), (4, True)]:
        assert live(layer(start), mode=mode, way=way, inline=inline, early=True, chunks=3, runs=3) == 3
    assert not [message for message in caplog.messages if "its graph is kept" in message]


@pytest.mark.parametrize("layer", KEEPING)
@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_a_layer_that_changes_what_is_not_copied_keeps_its_graph(
    layer: Callable[[int], nn.Module], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert live(layer(0), mode=mode, way="1f1b", inline=False, early=False, chunks=3, runs=3) == 3
    (message,) = [each for each in caplog.messages if "its graph is kept" in each]
    assert "forward changes '1." in message


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("way", WAYS)
def test_what_nobody_can_see_is_refused_by_the_partition(mode: str, way: str | None, inline: bool) -> None:
    model = nn.Sequential(*linears(1), Closure(), *linears(1))
    pipe = GPipe(model, [1, 2], devices=["cpu"] * 2, chunks=3, checkpoint=mode)
    with gpipe.inline() if inline else nullcontext(), pytest.raises(RuntimeError, match="another output") as caught:
        train(pipe, rows(), way)
    assert "in partition 1 (layers '1' to '2')" in "".join(caught.value.__notes__)
    assert "is_recomputing" in str(caught.value)
