"""Models with their own forward, split while it runs: no races, and the same results as the plain model.

Any operation may use values of previous stages: residuals and skips over several stages, masks and tables created on
the first device, tensors created on the device of a different one.
"""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpipe import GPipe
from gpipe.model._replay import order_backward
from gpipe.model._stage_run import ModelRun

from .accelerator import device
from .models import HOWS, MODES, OF_ALL, WIDTH, assert_trains_like, linear, rows, some_of, squares, whole_squares
from .placements import PLACEMENTS, STREAMS, UNEVEN, backward_streams, devices, forward_streams

# torch warns once per process: an autograd thread may hold the last node of a backward slightly longer.
pytestmark = [pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")]


class Model(nn.Module):
    """Six blocks in a list, after an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = linear()
        self.blocks = nn.ModuleList(linear() for _ in range(6))


class Residuals(Model):
    """Over several stages: one from each block to the next, one from the first to the last."""

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.embed(x).tanh()
        for block in self.blocks:
            h = h + block(h).tanh()
        return h * first.sigmoid() + first


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, h: Tensor, mask: Tensor, *, tables: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = tables
        mask = mask * torch.ones(WIDTH, dtype=h.dtype, device=h.device.type)  # the current device of that type
        return h + (self.inner(h * cos + h.flip(-1) * sin) * mask).tanh()


class Masked(Model):
    """Masks and rotary tables are made on the first device, the latter from a buffer, and used by all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.register_buffer("frequencies", torch.linspace(1, 2, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        mask = x.detach() > -1
        angles = self.frequencies * torch.arange(WIDTH, device=x.device)
        tables = angles.cos(), angles.sin()
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, mask, tables=tables)
        return torch.where(mask, h, h * self.frequencies)


class UNet(Model):
    """Skips over two stages, popped from a list."""

    def forward(self, x: Tensor) -> Tensor:
        h, skips = self.embed(x), []
        for block in self.blocks[:3]:
            h = block(h).tanh()
            skips.append(h)
        for block in self.blocks[3:]:
            h = block(torch.cat([h, skips.pop()], 1)[:, ::2]).tanh()
        return h + x


class Tied(Model):
    """The head has the weight of the embedding, and a frozen scale that is the first stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0, 1, WIDTH, dtype=torch.float64), requires_grad=False)
        self.shift = nn.Parameter(torch.linspace(0, 1, WIDTH, dtype=torch.float64))
        self.blocks[4].weight = self.blocks[1].weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h).tanh() + self.shift
        return F.linear(h * self.scale, self.embed.weight)


class Made(Model):
    """Creates tensors on the devices of inputs and of other stages, and in no_grad()."""

    def forward(self, x: Tensor) -> Tensor:
        half = torch.tensor(0.5, dtype=torch.float64)
        there = x.to(self.blocks[5].weight.device)
        far = torch.arange(WIDTH, device=self.blocks[5].weight.device)
        h = self.embed(x)
        for block in self.blocks:
            ones = torch.ones(WIDTH, dtype=torch.float64, device=self.embed.weight.device)
            ones[1:] = half
            with torch.no_grad():
                mean = h.mean(1, keepdim=True)
            h = block(h - mean + ones.to(h.device) * half).tanh()
        return h + there * far.to(h.device)


class InPlace(Model):
    """A tensor of one stage is modified in a second one, and used in a third one."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).tanh()
        sums, counts = h * 1, torch.zeros(len(x), WIDTH, dtype=torch.float64, device=x.device)
        kept = torch.zeros(len(x), WIDTH, dtype=torch.float64, device=x.device)
        for k, block in enumerate(self.blocks):
            h = block(h).tanh()
            sums.add_(h)
            counts[:, k:] += 1
            kept[:, k] = h[:, k]
        return sums / counts + kept


MODELS = {kind.__name__.lower(): kind for kind in (Residuals, Masked, UNet, Tied, Made, InPlace)}
CASES = [
    (placement, how, streams)
    for placement in PLACEMENTS
    for how in HOWS
    for streams in STREAMS
    if how == "call" or streams != "foreign"
    if not (how == "interleaved" and placement in UNEVEN)
]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def piped(plain: nn.Module, placement: str, mode: str, **options: Any) -> GPipe:
    return GPipe(copy.deepcopy(plain), devices=devices(placement), chunks=3, checkpoint=mode, **options)


@pytest.mark.parametrize(
    ("name", "case", "mode", "inline"), some_of(MODELS, CASES, MODES, [False, True], every=127), ids=str
)
def test_in_order_and_equal(name: str, case: tuple[str, str, str], mode: str, inline: bool) -> None:
    placement, how, streams = case
    plain = made(name)
    assert_trains_like(plain, piped(plain, placement, mode), how, streams, inline=inline)


@pytest.mark.parametrize(
    ("name", "placement", "how", "streams", "mode"),
    some_of(MODELS, PLACEMENTS, OF_ALL, ["default", "own"], MODES, every=79),
)
def test_a_loss_of_all_rows(name: str, placement: str, how: str | None, streams: str, mode: str) -> None:
    """The forward is replayed, over several devices."""
    plain = made(name)
    assert_trains_like(plain, piped(plain, placement, mode), how, streams, loss_fn=whole_squares)


@pytest.mark.parametrize("name", MODELS)
def test_inputs_may_be_on_the_host(name: str) -> None:
    plain = made(name)
    pipe = piped(plain, "three devices", "never")
    x = rows()
    with forward_streams("own"):
        torch.testing.assert_close(pipe(x).cpu(), plain(x))
        for inference in (torch.no_grad, torch.inference_mode):
            with inference():
                torch.testing.assert_close(pipe(x).cpu(), plain(x))
        loss = pipe.step(x, loss_fn=whole_squares)
        torch.testing.assert_close(loss.cpu(), whole_squares(plain(x)).detach())


def test_backward_of_replay_waits_for_caller() -> None:
    weight = torch.ones(WIDTH, device=device(0), requires_grad=True)
    weight.grad = torch.ones(WIDTH, device=device(0))
    with forward_streams("own"):
        loss = order_backward((weight.to(device(1)) * 2).sum(), {device(0), device(1)})
        with backward_streams("foreign"):
            weight.grad.zero_()
            loss.backward()
    assert weight.grad.tolist() == [2] * WIDTH


class Chain(Model):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.parametrize("enabled", [False, True])
def test_block_arguments_are_sent_when_computed(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not delayed until the block's worker is ready to receive it."""
    pipe = GPipe(Chain(), devices=devices("three devices"), chunks=3)
    turns = []
    sent = ModelRun.send

    def watched(run: ModelRun, tensor: Tensor, source: int, target: int, done: Any) -> Any:
        turns.append((torch.accelerator.current_device_index(), source, target))
        return sent(run, tensor, source, target, done)

    monkeypatch.setattr(ModelRun, "send", watched)
    with torch.set_grad_enabled(enabled):
        pipe.evaluate(rows(), loss_fn=squares, reduction="sum")
    assert sorted({*turns}) == [(0, 0, 1), (1, 1, 2)]


def test_threads_of_forwards_choose_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the one that is current in a new thread, where a context would take memory of a GPU for nothing."""
    pipe = GPipe(Chain(), devices=[device(1), device(2)], chunks=3)
    chosen = set()
    choose = torch.accelerator.set_device_index

    def watched(index: int) -> None:
        if threading.current_thread().name.startswith("gpipe forward"):
            chosen.add(index)
        choose(index)

    monkeypatch.setattr(torch.accelerator, "set_device_index", watched)
    pipe.step(rows(), loss_fn=squares, reduction="sum", schedule="1f1b")
    assert chosen == {1, 2}
