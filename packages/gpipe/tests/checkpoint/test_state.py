"""Layers that remember what they saw: a pipe is the plain loop over micro-batches, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe import GPipe, is_recomputing

from ..layers import DOUBLE, MODES, Layer, assert_same, linears, rows, running

WAYS = (None, "fill_drain", "1f1b", "zero_bubble")
"""Without a schedule: forward and backward of the whole mini-batch."""


def remembers(start: int, act: Callable[[Layer, Tensor, bool], Tensor], *modules: nn.Module, **state: Any) -> Layer:
    """A layer that does something else from the micro-batch on that is the ``start``-th, counted by a buffer."""

    def forward(s: Layer, x: Tensor) -> Tensor:
        s.seen += 1
        return act(s, x, int(s.seen) > start)

    return Layer(forward, *modules, seen=torch.zeros((), dtype=torch.long), **state)


def averaged(s: Layer, x: Tensor, begun: bool) -> Tensor:
    """With a running average."""
    output = x * s.mean.clone()
    if begun:
        s.move(s, 0.5 * s.mean + x.detach().mean())
    return output


def by_numpy(s: Layer, fresh: Tensor) -> None:
    """Changes values, and no version."""
    s.mean.numpy()[...] = fresh.numpy()


def large(s: Layer, x: Tensor, begun: bool) -> Tensor:
    """More than is copied just in case."""
    output = x * s.mean[7].clone()
    if begun:
        s.mean.mul_(0.9)
    return output


def statistics(s: Layer, x: Tensor, begun: bool) -> Tensor:
    """Batch norm by hand, whose kernel changes buffers and no version."""
    return F.batch_norm(x, s.mean, s.var, training=True) if begun else x * 1


def attribute(s: Layer, x: Tensor, begun: bool) -> Tensor:
    output = x * s.factor
    if begun:
        s.factor *= 0.8
    return output


def hidden(s: Layer, x: Tensor, begun: bool) -> Tensor:
    """Keeps a tensor that is no buffer: as a recurrent network does between its calls."""
    h = x if s.h is None else x * s.h.mean().tanh() + x
    s.h = h.detach() if begun else None
    return h


def added(s: Layer, x: Tensor, begun: bool) -> Tensor:
    """Changes a tensor in place that is no buffer."""
    if begun:
        s.total += x.detach().sign().mean(0)
    return x * s.total.clone() + x


def adding(start: int) -> Layer:
    layer = remembers(start, added)
    layer.total = torch.zeros(3, dtype=DOUBLE)
    return layer


def listed(s: Layer, x: Tensor, begun: bool) -> Tensor:
    """Keeps a number where nobody can look."""
    s.list[0] += begun
    return x * 0.9 ** s.list[0]  # not a growing factor: the tanh behind it would hide what it is


def polite(s: Layer, x: Tensor, begun: bool) -> Tensor:
    """Counts unless it is a recomputation."""
    now = s.list[0]
    if not is_recomputing():
        s.list[0] += begun
    return x * 2 + 0 * now


def decaying(s: Layer, x: Tensor, begun: bool) -> Tensor:
    """Changes its own weight."""
    if begun:
        with torch.no_grad():
            s.m[0].weight.mul_(0.9)
    return s.m[0](x)


def momentum(s: Layer, x: Tensor, begun: bool) -> Tensor:
    """Moves an average of its weight."""
    with torch.no_grad():
        s.average.lerp_(s.m[0].weight, 0.1 if begun else 0.0)
        target = x @ s.average
    return s.m[0](x) + target


def bag(s: Layer, x: Tensor, begun: bool) -> Tensor:
    """Renormalises the weights that it looks up."""
    return s.m[0](x.detach().abs().mul(4).long().clamp(0, 8)).sum(1) * x


def noise(s: Layer, x: Tensor, begun: bool) -> Tensor:
    """Draws from a generator of its own."""
    return x * torch.rand(x.shape, generator=s.generator, dtype=DOUBLE) if begun else x * 1


def one() -> Tensor:
    return torch.ones((), dtype=DOUBLE)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=DOUBLE)


def table() -> nn.Module:
    weights = torch.arange(27, dtype=DOUBLE).sin().view(9, 3)
    return nn.Embedding.from_pretrained(weights, freeze=False, max_norm=0.5)


WORKING: dict[str, Callable[[int], nn.Module]] = {
    "average": lambda k: remembers(k, averaged, mean=one(), move=lambda s, fresh: s.mean.copy_(fresh)),
    "replaced": lambda k: remembers(k, averaged, mean=one(), move=lambda s, fresh: setattr(s, "mean", fresh)),
    "statistics": lambda k: remembers(k, statistics, mean=zeros(3), var=1 + zeros(3)),
    "polite": lambda k: remembers(k, polite, list=[0]),
    "noise": lambda k: remembers(k, noise, generator=torch.Generator().manual_seed(1)),
    "momentum": lambda k: remembers(k, momentum, *linears(1), average=zeros(3, 3)),
}
"""Those that are right whenever they begin, in all modes."""
KEEPING: dict[str, Callable[[int], nn.Module]] = {
    "attribute": lambda k: remembers(k, attribute, factor=1.0),
    "hidden": lambda k: remembers(k, hidden, h=None),
    "tensor": adding,
    "decaying": lambda k: remembers(k, decaying, *linears(1)),
    "large": lambda k: remembers(k, large, mean=torch.ones(5000, dtype=DOUBLE)),
    "bag": lambda k: remembers(k, bag, table()),
    "momentum of a parameter": lambda k: remembers(
        k, momentum, *linears(1), average=nn.Parameter(zeros(3, 3), requires_grad=False)
    ),
}
"""Those whose graph is kept; they are refused if they begin after the first micro-batch of a run."""
REMEMBERING: dict[str, Callable[[int], nn.Module]] = {
    **WORKING,
    **KEEPING,
    "numpy": lambda k: remembers(k, averaged, mean=one(), move=by_numpy),
    "list": lambda k: remembers(k, listed, list=[0]),
}


def again(s: Layer, x: Tensor) -> Tensor:
    """Calls a layer more than once in a forward."""
    for _ in range(s.times):
        x = s.m[0](x)
    return x


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
    name: str, start: int, *, mode: str, way: str | None, inline: bool, early: bool, chunks: int, runs: int,
    times: int = 1,
) -> int:  # fmt: skip
    """Train a pipe and the plain model; the run in which the pipe refused, or ``runs``."""

    def built() -> nn.Sequential:
        (first, last), layer = linears(2), REMEMBERING[name](start)
        return nn.Sequential(first, layer if times == 1 else Layer(again, layer, times=times), nn.Tanh(), last)

    model = built()
    pipe = GPipe(built(), [3, 1] if early else [1, 3], devices=["cpu"] * 2, chunks=chunks, checkpoint=mode)
    with running(inline):
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
    name=st.sampled_from(sorted(REMEMBERING)),
    start=st.integers(0, 9),
    mode=st.sampled_from(MODES),
    way=st.sampled_from(WAYS),
    inline=st.booleans(),
    early=st.booleans(),
    chunks=st.integers(1, 4),
    times=st.integers(1, 3),
)
def test_equal_or_refused(name: str, start: int, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPIPE_CHECK", str(int(name == "list")))
        live(name, start, **options, runs=4)


@pytest.mark.parametrize("name", WORKING)
@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("way", [None, "1f1b"])
def test_what_shows_in_small_buffers_works(
    name: str, mode: str, way: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    for start, inline in [(3, False), (0, False), (4, True)]:
        assert live(name, start, mode=mode, way=way, inline=inline, early=True, chunks=3, runs=3) == 3
    assert not [message for message in caplog.messages if "its graph is kept" in message]


@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_a_layer_that_changes_what_is_not_copied_keeps_its_graph(
    name: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert live(name, 0, mode=mode, way="1f1b", inline=False, early=False, chunks=3, runs=3) == 3
    (message,) = [each for each in caplog.messages if "its graph is kept" in each]
    assert "forward changes '1." in message


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("way", WAYS)
def test_what_nobody_can_see_is_refused_by_the_partition(mode: str, way: str | None, inline: bool) -> None:
    model = nn.Sequential(*linears(1), REMEMBERING["list"](0), *linears(1))
    pipe = GPipe(model, [1, 2], devices=["cpu"] * 2, chunks=3, checkpoint=mode)
    with running(inline), pytest.raises(RuntimeError, match="another output") as caught:
        train(pipe, rows(), way)
    assert "in partition 1 (layers '1' to '2')" in "".join(caught.value.__notes__)
    assert "is_recomputing" in str(caught.value)
