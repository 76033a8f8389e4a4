"""Random numbers and statistics between blocks, in a replay: harmless, or an error."""

import random
import threading
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe import GPipe

WIDTH = 4


class Model(nn.Module):
    """Four blocks; ``between`` computes what follows each, from its input and its output."""

    def __init__(self, begin: nn.Module, between: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.begin, self.end, self.between = begin, nn.Linear(WIDTH, 1), between
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = self.between(x, layer(x))
        return F.mse_loss(self.end(x)[:, 0], y)


def plain(x: Tensor, output: Tensor) -> Tensor:
    return output.tanh()


def piped(model: Model) -> GPipe:
    return GPipe(model, devices=["cpu"] * 3, chunks=3)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, WIDTH), torch.randn(6)


def test_a_dropout_before_the_blocks_does_no_harm() -> None:
    """The full-batch loss uses the blocks' outputs, whatever random numbers the replay uses before them."""
    model = Model(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout()), plain)
    last: list[Tensor] = []
    model.end.register_forward_pre_hook(lambda _, args: last.append(args[0].detach()))
    x, y = batch()
    pipe = piped(model)
    for _ in range(2):
        loss = pipe.step(x, y=y)
        torch.testing.assert_close(loss, F.mse_loss(model.end(last[-1])[:, 0], y).detach())
    pipe.close()


def torch_draws(x: Tensor, output: Tensor) -> Tensor:
    return x + F.dropout(output, 0.5, training=True)


def python_draws(x: Tensor, output: Tensor) -> Tensor:
    return output * (1 + random.random())


@pytest.mark.parametrize(("between", "says"), [(torch_draws, "torch"), (python_draws, "Python's random")])
def test_what_would_depend_on_other_draws_is_refused(between: Callable[[Tensor, Tensor], Tensor], says: str) -> None:
    x, y = batch()
    pipe = piped(Model(nn.Identity(), between))
    for _ in range(2):  # also once the calls of blocks are known
        with pytest.raises(RuntimeError, match=rf"draws random numbers \({says}\)"):
            pipe.step(x, y=y)
    # A loss that each micro-batch computes depends on its own draws alone.
    assert pipe.step(x, y=y, reduction="mean").isfinite()
    pipe.close()


NUMPY = pytest.importorskip("numpy").random
SOURCES = (random.random, NUMPY.rand, lambda: torch.rand(()).item())


@pytest.mark.parametrize("draw", SOURCES)
@pytest.mark.parametrize("quiet", [1, 3, 7])
def test_draws_that_begin_later_are_told(
    draw: Callable[[], float], quiet: int, caplog: pytest.LogCaptureFixture
) -> None:
    """After some micro-batches that drew nothing, in the same step or in an earlier one.

    Torch's raise an error. Python's and NumPy's may be of another thread, and raise one only while a piece is watched.
    """
    forwards, own = [0], threading.local()

    class Counts(nn.Identity):
        def forward(self, x: Tensor) -> Tensor:
            forwards[0] += 1
            own.draws = forwards[0] > quiet
            return x

    x, y = batch()
    pipe = piped(Model(Counts(), lambda x, output: output * (1 + (draw() if own.draws else 0.0))))
    told = ""
    try:
        for _ in range(1 + quiet // 3):
            pipe.step(x, y=y)
    except RuntimeError as error:
        told = str(error)
    if draw is SOURCES[-1]:
        assert "draws random numbers (torch, and reads them by item())" in told
    else:
        assert "draws random numbers" in told or "did not before" in caplog.text
    pipe.close()


READS: tuple[Callable[[Tensor], float], ...] = (
    Tensor.item,
    float,
    lambda x: x.reshape(1).tolist()[0],
    lambda x: float(x.numpy()),
    lambda x: 1.0 if x < 0.5 else 2.0,
)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("own", [True, False])
def test_random_numbers_read_between_blocks_are_refused(read: Callable[[Tensor], float], own: bool) -> None:
    generator = torch.Generator() if own else None

    def between(x: Tensor, output: Tensor) -> Tensor:
        for _ in range(8):  # several, because branches may be equal
            output = output * (1 + read(torch.rand((), generator=generator)))
        return output

    x, y = batch()
    pipe = piped(Model(nn.Identity(), between))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"draws random numbers \(torch, and reads"):
            pipe.step(x, y=y)
    pipe.close()


def test_guards_against_nan_are_fine() -> None:
    """They read the same from random tensors in all micro-batches, which may differ in the number of other reads."""

    def between(x: Tensor, output: Tensor) -> Tensor:
        for row in x:
            assert row.isfinite().all().item()
        dropped = F.dropout(output, 0.5)
        if torch.isnan(dropped).any():
            raise ValueError
        return output

    x, y = batch()
    pipe = piped(Model(nn.Identity(), between))
    for _ in range(2):
        pipe.step(x, y=y)
    pipe.close()


def test_decisions_equal_in_all_micro_batches_are_fine() -> None:
    """Models with layerdrop=0 draw numbers in vain."""
    model = Model(nn.Identity(), lambda x, output: x if torch.rand(()) < 0 else output.tanh())
    x, y = batch()
    expected = deepcopy(model)(x, y)
    pipe = piped(model)
    for _ in range(2):
        torch.testing.assert_close(pipe.step(x, y=y), expected.detach())
    pipe.close()


TAILS = (lambda x: F.dropout(x, 0.5), lambda x: x * random.random(), lambda x: x * NUMPY.rand())


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("way", ["step", "evaluate"])
def test_first_numbers_after_blocks_are_as_later_ones(tail: Callable[[Tensor], Tensor], way: str) -> None:
    class Tailed(Model):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return tail(super().forward(x, y) + torch.ones(4)).sum()

    x, y = batch()
    pipe = piped(Tailed(nn.Identity(), plain))
    found = []
    for _ in range(3):
        torch.manual_seed(1)
        random.seed(1)
        NUMPY.seed(1)
        found.append([getattr(pipe, way)(x, y=y).item(), torch.rand(()).item(), random.random(), NUMPY.rand()])
    assert found[0] == found[1] == found[2]
    pipe.close()


class Encoding(Model):
    """Returns a random tensor computed before its blocks in addition to the loss, like T5's encoder state."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        dropped = F.dropout(self.begin(x), 0.5)
        hidden = dropped
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return {"loss": F.mse_loss(self.end(hidden)[:, 0], y), "dropped": dropped}


def test_random_output_field_need_not_affect_loss() -> None:
    x, y = batch()
    pipe = piped(Encoding(nn.Linear(WIDTH, WIDTH), plain))
    last: list[Tensor] = []
    pipe.end.register_forward_pre_hook(lambda _, args: last.append(args[0].detach()))
    for _ in range(2):
        loss = pipe.step(x, y=y)
        torch.testing.assert_close(loss, F.mse_loss(pipe.end(last[-1])[:, 0], y).detach())
    for refused in (lambda: pipe(x, y=y), lambda: pipe.step(x, y=y, return_outputs=True)):
        with pytest.raises(RuntimeError, match="draws random numbers"):
            refused()
    pipe.close()


class Anew(nn.BatchNorm1d):
    """Stores its statistics in new tensors each time."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        self.running_mean = self.running_mean + 0.1 * (input.detach().mean(0) - self.running_mean)
        self.num_batches_tracked = self.num_batches_tracked + 1
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, Anew])
def test_statistics_before_blocks_count_once_for_each_microbatch(kind: type[nn.Module]) -> None:
    model = Model(kind(WIDTH), plain)
    single = deepcopy(model)
    pipe = piped(model)
    for steps in range(1, 4):
        x, y = batch()
        pipe.step(x, y=y)
        for part in zip(x.chunk(3), y.chunk(3), strict=True):
            single(*part)
        assert model.begin.num_batches_tracked == 3 * steps
        torch.testing.assert_close(model.begin.running_mean, single.begin.running_mean)
    pipe.close()


class Tied(Model):
    """The model itself uses a tied weight on both sides of its blocks."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), plain)
        self.decoder = nn.Linear(WIDTH, WIDTH)
        self.decoder.weight = self.begin.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = x = self.begin(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return F.mse_loss(self.end(self.decoder(x + first))[:, 0], y)


def test_weight_tied_across_blocks_is_one_parameter() -> None:
    x, y = batch()
    model = Tied()
    single = deepcopy(model)
    pipe = piped(model)
    pipe.step(x, y=y)
    single(x, y).backward()
    for own, other in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    pipe.close()
