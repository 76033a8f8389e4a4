"""Stateful layers: a pipe matches the plain loop over micro-batches, or raises."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe import GPipe, is_recomputing
from gpipe.checkpoint import _state

from ..layers import DOUBLE, MODES, Layer, assert_same, linears, rows, running, trained
from ..odd_layers import ODD, WIDTH, Odd

WAYS = (None, "fill_drain", "1f1b", "zero_bubble")
"""Schedules; None means forward and backward of the full mini-batch."""


def late(s: Layer, x: Tensor) -> Tensor:
    """Does what is odd from the micro-batch on that is the ``start``-th, counted by a buffer."""
    s.seen += 1
    odd = s.m[0]
    return ACTS[odd.kind](odd, x) if int(s.seen) > s.start else odd.linear(x)


def remembers(kind: str, start: int) -> Layer:
    odd = Odd(kind)
    odd.register_buffer("average", torch.zeros(WIDTH, WIDTH, dtype=DOUBLE))
    if kind == "noise":
        odd.generator = torch.Generator().manual_seed(1)
    odd.spare.requires_grad_(kind != "momentum of a parameter")
    return Layer(late, odd, start=start, seen=torch.zeros((), dtype=torch.long))


def polite(s: Odd, x: Tensor) -> Tensor:
    """Count calls in hidden state, except in recomputations."""
    if not is_recomputing():
        s.all.append(None)
    return s.linear(x)


def statistics(s: Odd, x: Tensor) -> Tensor:
    """Run functional batch norm, whose kernel updates buffers without a new version."""
    return F.batch_norm(x, s.mean, s.average[0], training=True)


def aliased(s: Odd, x: Tensor) -> Tensor:
    """Changes a buffer through a list."""
    s.all[:] = [s.calls]
    s.all[0].add_(1)
    return s.linear(x)


def added(s: Odd, x: Tensor) -> Tensor:
    """Modifies a tensor in place that is not a buffer."""
    s.kept = torch.zeros(WIDTH, dtype=DOUBLE) if s.kept is None else s.kept
    s.kept += x.detach().mean(0)
    return s.linear(x) * s.kept.clone()


def appends(s: Odd, x: Tensor) -> Tensor:
    """Append a tensor to a list that any code may read."""
    s.all.append(x.mean())
    return s.linear(x)


def momentum(s: Odd, x: Tensor) -> Tensor:
    """Moves an average of its weight."""
    with torch.no_grad():
        s.average.lerp_(s.linear.weight, 0.1)
        target = x @ s.average
    return s.linear(x) + target


def momentum_of_a_parameter(s: Odd, x: Tensor) -> Tensor:
    with torch.no_grad():
        s.spare.lerp_(s.linear.bias, 0.1)
        target = x * s.spare
    return s.linear(x) + target


ACTS: dict[str, Callable[[Odd, Tensor], Tensor]] = {
    **ODD,
    "polite": polite,
    "set again": lambda s, x: vars(s).update(kind=" ".join(["set", "again"])) or s.linear(x),  # an equal object
    "statistics": statistics,
    "aliased": aliased,
    "added": added,
    "appends": appends,
    "momentum": momentum,
    "momentum of a parameter": momentum_of_a_parameter,
    "noise": lambda s, x: s.linear(x) * torch.rand(x.shape, generator=s.generator, dtype=DOUBLE),
}
WORKING = ("counted", "averaged", "set again", "statistics", "polite", "noise", "momentum")
"""Layers that are correct in all modes, from any call on."""
KEEPING = ("number", "carries", "added", "appends", "decays", "large", "renorms", "momentum of a parameter")
"""Layers that keep their graph; an error if they begin after the first micro-batch of a run."""
REMEMBERING = (*WORKING, *KEEPING, "by_numpy", "listed", "aliased")


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


def assert_state_alike(pipe: nn.Module, model: nn.Module) -> None:
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(model.named_buffers()))
    torch.testing.assert_close(dict(pipe.named_parameters()), dict(model.named_parameters()))
    for ours, theirs in zip(pipe.modules(), model.modules(), strict=True):
        for name in ("value", "kept"):
            torch.testing.assert_close(getattr(ours, name, None), getattr(theirs, name, None), msg=name)


def live(
    name: str, start: int, *, mode: str, way: str | None, inline: bool, early: bool, chunks: int, runs: int,
    times: int = 1,
) -> int:  # fmt: skip
    """Train a pipe and the plain model. Return the run in which the pipe raised, or ``runs``."""

    def built() -> nn.Sequential:
        torch.manual_seed(0)
        (first, last), layer = linears(2, WIDTH), remembers(name, start)
        return nn.Sequential(first, layer if times == 1 else Layer(again, layer, times=times), nn.Tanh(), last)

    model = built()
    pipe = GPipe(built(), [3, 1] if early else [1, 3], devices=["cpu"] * 2, chunks=chunks, checkpoint=mode)
    with running(inline):
        for run in range(runs):
            x = rows(2 * chunks, WIDTH) * (run + 1)
            try:
                _, output = trained(pipe, x, way)
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
    name=st.sampled_from(REMEMBERING),
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
        patch.setenv("GPIPE_CHECK", str(int(name == "listed")))
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
def test_layer_changing_uncopied_state_keeps_graph(name: str, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    assert live(name, 0, mode=mode, way="1f1b", inline=False, early=False, chunks=3, runs=3) == 3
    (message,) = [each for each in caplog.messages if "its graph is kept" in each]
    assert "forward changes '1." in message


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("mode", ["always", "except_last"])
@pytest.mark.parametrize("way", WAYS)
def test_undetected_state_change_fails_recomputation_check(mode: str, way: str | None, inline: bool) -> None:
    model = nn.Sequential(*linears(1, WIDTH), remembers("listed", 0), *linears(1, WIDTH))
    pipe = GPipe(model, [1, 2], devices=["cpu"] * 2, chunks=3, checkpoint=mode)
    with running(inline), pytest.raises(RuntimeError, match="another output") as caught:
        trained(pipe, rows(6, WIDTH), way)
    assert "in partition 1 (layers '1' to '2')" in "".join(caught.value.__notes__)
    assert "is_recomputing" in str(caught.value)


def assigned(key: Tensor, query: Tensor) -> None:
    key.data = key.data * 0.5 + query.data[: len(key)] * 0.5


def in_place(key: Tensor, query: Tensor) -> None:
    key.data.mul_(0.5).add_(query.data[: len(key)], alpha=0.5)


def copied(key: Tensor, query: Tensor) -> None:
    key.data.copy_(key.data * 0.5 + query.data[: len(key)] * 0.5)


def turned(key: Tensor, query: Tensor) -> None:
    """Reorder the values, like a queue."""
    key.data.copy_(key.data.roll(1, 0))


def by_numpy(key: Tensor, query: Tensor) -> None:
    key.detach().numpy()[:] *= 0.5


def counted(key: Tensor, query: Tensor) -> None:
    with torch.no_grad():
        key.mul_(0.5)


MOVES = (assigned, in_place, copied, turned, by_numpy, counted)


class Follows(nn.Module):
    """A parameter or buffer that follows a weight from some call on, like MoCo's key encoder."""

    def __init__(self, move: Callable[[Tensor, Tensor], None], size: int, is_parameter: bool, start: int = 0) -> None:
        super().__init__()
        self.query, self.move, self.start = nn.Linear(3, size, dtype=DOUBLE), move, start
        key = torch.linspace(-1, 1, size * 3, dtype=DOUBLE).view(size, 3)
        if is_parameter:
            self.key = nn.Parameter(key, requires_grad=False)
        else:
            self.register_buffer("key", key)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if int(self.calls) > self.start:
            self.move(self.key, self.query.weight)
        return self.query(x)[:, :3]


@settings(max_examples=settings.default.max_examples // 2)
@given(
    move=st.sampled_from(MOVES),
    size=st.sampled_from([4, 2000]),
    is_parameter=st.booleans(),
    start=st.just(0) | st.integers(0, 7),
    mode=st.sampled_from(MODES),
    way=st.sampled_from(WAYS),
    inline=st.booleans(),
)
@example(move=in_place, size=4, is_parameter=True, start=1, mode="always", way=None, inline=False)
@example(move=in_place, size=4, is_parameter=True, start=4, mode="always", way="1f1b", inline=False)
@example(move=assigned, size=4, is_parameter=True, start=4, mode="always", way="1f1b", inline=False)
def test_state_is_updated_once_per_micro_batch(
    move: Callable[[Tensor, Tensor], None],
    size: int,
    is_parameter: bool,
    start: int,
    mode: str,
    way: str | None,
    inline: bool,
) -> None:
    """It raises if a later micro-batch is the first to move it."""

    def layers() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Follows(move, size, is_parameter, start), nn.Linear(3, 3, dtype=DOUBLE))

    with pytest.MonkeyPatch.context() as patch, running(inline):
        # After a pipe's first run, changes without a trace are detected only with this setting.
        patch.setenv("GPIPE_CHECK", str(int(start > 0 and move not in (assigned, counted))))
        pipe, plain = GPipe(layers(), [1, 1], devices=["cpu"] * 2, chunks=3, checkpoint=mode), layers()
        # The first micro-batch of a run shows that graphs must be kept.
        refusal = nullcontext() if start % 3 == 0 else suppress_refusal()
        with closing(pipe), refusal:
            for _ in range(3):
                trained(pipe, rows(6), way)
                for part in rows(6).chunk(3):
                    plain(part)
                torch.testing.assert_close(pipe[0].key, plain[0].key, rtol=1e-12, atol=1e-12)


@contextmanager
def suppress_refusal() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "'0.key' changed" not in str(error):
            raise


def test_tensor_values_are_read_once_per_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes graphs kept for a different reason. Reading the values blocks the host."""
    looked: list[Any] = []
    monkeypatch.setattr(_state, "_sums", lambda tensor: looked.append(tensor) or torch.zeros(1))
    for name in ("number", "counted"):
        pipe = GPipe(nn.Sequential(Odd(name)), [1], devices=["cpu"], chunks=3, checkpoint="always")
        counts = []
        for _ in range(3):
            trained(pipe, rows(6, WIDTH), "1f1b")
            counts.append(len(looked))
        assert counts[0] > 0
        assert counts[1:] == counts[:1] * 2
        looked.clear()
