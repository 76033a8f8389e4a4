"""Saved tensors offloaded to the host: no races, the plain model's results, and few on a device at a time."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gpipe import GPipe, inline
from gpipe.engine import _saved
from gpipe.engine._offloaded import HostLink
from gpipe.engine._saved import Leaving, SavedTensors
from gpipe.engine._stage_run import StageRun

from . import accelerator, test_model, test_tied
from .models import HOWS, OF_ALL, assert_trains_like, model, piped, some_of, squares, whole_squares
from .placements import PLACEMENTS, STREAMS, UNEVEN

# torch warns once per process: it must order streams for nodes that are kept alive.
pytestmark = [pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")]


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Offload even the small tensors of these models."""
    with monkeypatch.context() as patched:
        patched.setattr(_saved, "SMALL", 0)
        yield


@pytest.mark.parametrize(
    ("placement", "how", "streams", "inline", "shares", "offload"),
    some_of(PLACEMENTS, HOWS, STREAMS, [False, True], [False, True], [False, True], every=47),
)
def test_in_order_and_equal(placement: str, how: str, streams: str, inline: bool, shares: bool, offload: bool):
    if how == "interleaved" and placement in UNEVEN:
        return
    plain = test_tied.model() if shares else model()
    with accelerator.no_races():
        pipe = piped(plain, placement, "offload", offload=offload)
        assert_trains_like(plain, pipe, how, streams, inline=inline)


@pytest.mark.parametrize(
    ("name", "placement", "how", "streams", "whole"),
    some_of(
        test_model.MODELS, PLACEMENTS, [how for how in HOWS if how != "interleaved"], STREAMS, [False, True], every=61
    ),
)
def test_a_model_with_operations_between_blocks(name: str, placement: str, how: str, streams: str, whole: bool):
    plain = test_model.made(name)
    pipe = test_model.piped(plain, placement, "offload")
    loss = {"loss_fn": whole_squares} if whole and how == "fill_drain" else {}
    with accelerator.no_races():
        assert_trains_like(plain, pipe, how, streams, **loss)


@pytest.mark.parametrize(("placement", "schedule"), some_of(PLACEMENTS, OF_ALL, every=11))
def test_a_loss_of_all_rows(placement: str, schedule: str | None):
    plain = model()
    with accelerator.no_races():
        assert_trains_like(plain, piped(plain, placement, "offload"), schedule, "own", loss_fn=whole_squares)


ROWS, WIDTH, DEPTH, CHUNKS = 16, 64, 6, 8


class Row(nn.Module):
    """The same layers as in :func:`deep`, called by the model's own forward."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def deep() -> nn.Sequential:
    """Two blocks, whose tanh layers save what they return."""
    return nn.Sequential(*(nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()] * DEPTH) for _ in range(2)))


def train(pipe: GPipe, x: torch.Tensor, how: str) -> None:
    if how == "call":
        pipe(x).square().sum().backward()
    else:
        pipe.step(x, loss_fn=squares, reduction="sum", schedule=how)


def smallest(mode: str, how: str, own_forward: bool) -> int:
    """Return the number of bytes that a step needs on the device, more than are in use between steps."""
    places = [accelerator.device(0)] * 2
    layers = deep()
    if own_forward:
        pipe = GPipe(Row(layers), devices=places, chunks=CHUNKS, checkpoint=mode, blocks=["blocks.0", "blocks.1"])
    else:
        pipe = GPipe(layers, [1, 1], devices=places, chunks=CHUNKS, checkpoint=mode)
    x = torch.randn(CHUNKS * ROWS, WIDTH).to(places[0])

    def fits(size: int) -> bool:
        pipe.zero_grad(set_to_none=False)
        try:
            with accelerator.limited(0, size), inline():
                train(pipe, x, how)
        except torch.OutOfMemoryError:
            return False
        return True

    assert fits(1 << 30)
    lower, upper = 0, 1 << 22
    while upper - lower > CELL // 8:
        middle = (lower + upper) // 2
        lower, upper = (lower, middle) if fits(middle) else (middle, upper)
    pipe.close()
    return upper


CELL = ROWS * WIDTH * 4
"""Bytes between two layers, for one micro-batch."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("own_forward", [False, True])
@pytest.mark.parametrize("how", ["call", "fill_drain", "looped_bfs"])
def test_a_device_holds_what_two_cells_save(how: str, own_forward: bool):
    """It also holds inputs and outputs of all cells, like a pipe that recomputes.

    If the loss of each micro-batch directly follows its forward, the last stage also holds its output and gradient.
    """
    never, always, offload = (smallest(mode, how, own_forward) for mode in ("never", "always", "offload"))
    of_losses = 0 if own_forward or how == "call" else 2 * CHUNKS
    assert offload <= always + (DEPTH + 2 + of_losses) * CELL
    assert never >= offload + (2 * CHUNKS - 4) * (DEPTH - 1) * CELL


@pytest.mark.parametrize("how", ["fill_drain", "1f1b"])
def test_tensors_of_many_bytes(how: str):
    """The size limit of offloading has its default value."""
    plain, x = deep(), torch.randn(CHUNKS * ROWS, WIDTH)
    pipe = GPipe(copy.deepcopy(plain), [1, 1], devices=[accelerator.device(0)] * 2, chunks=CHUNKS, checkpoint="offload")
    with accelerator.no_races():
        for _ in range(2):
            pipe.step(x.to(pipe.devices[0]), loss_fn=squares, reduction="sum", schedule=how)
            squares(plain(x)).backward()
    torch.testing.assert_close([p.grad.cpu() for p in pipe.parameters()], [p.grad for p in plain.parameters()])
    pipe.close()


def test_nothing_remains_on_the_device():
    places = [accelerator.device(0), accelerator.device(1)]
    pipe = GPipe(deep(), [1, 1], devices=places, chunks=CHUNKS, checkpoint="offload")
    x = torch.randn(CHUNKS * ROWS, WIDTH).to(places[0])
    for _ in range(2):
        pipe.step(x, loss_fn=squares, reduction="sum")
    before = accelerator.used()
    pipe.step(x, loss_fn=squares, reduction="sum")
    pipe(x)  # its graph is dropped
    assert accelerator.used() == before
    pipe.close()


def test_copies_do_not_hold_up_computations():
    """They run on separate streams, each after only its own inputs."""
    device = accelerator.device(0)
    compute, link = torch.accelerator.current_stream(device), HostLink.of(device)
    leaving = Leaving()
    saved = SavedTensors(device, link, compute, leaving)
    x = torch.ones(1 << 12, device=device, requires_grad=True)
    with saved.saving():
        y = (x * 2).exp() * 3
    saved.offload()
    (storage,) = [each() for each in saved._storages]
    storage.bytes.to(device, non_blocking=True)
    assert len(accelerator.found()) == 1  # it is on its way
    leaving.free()
    storage.bytes.to(device, non_blocking=True)
    assert not accelerator.found()
    saved.prefetch()
    storage.bytes.sum()
    assert len(accelerator.found()) == 1
    saved.arrive()
    storage.bytes.sum()
    assert not accelerator.found()
    y.sum().backward()
    torch.testing.assert_close(x.grad.cpu(), torch.full_like(x.grad.cpu(), 6 * math.exp(2)))


@pytest.mark.parametrize("how", ["fill_drain", "1f1b"])
def test_the_host_waits_for_no_copy(how: str, monkeypatch: pytest.MonkeyPatch):
    places = [accelerator.device(0), accelerator.device(1)]
    pipe, seen = GPipe(deep(), [1, 1], devices=places, chunks=4, checkpoint="offload"), []
    leave = StageRun.leave

    def watched(self: StageRun) -> None:
        seen.append(accelerator.library().take_counters())
        leave(self)

    x = torch.randn(4 * ROWS, WIDTH).to(places[0])
    pipe.step(x, loss_fn=squares, reduction="sum", schedule=how)
    accelerator.library().take_counters()
    with monkeypatch.context() as patched:
        patched.setattr(StageRun, "leave", watched)
        pipe.step(x, loss_fn=squares, reduction="sum", schedule=how)
    assert seen[0]["synchronisations"] == seen[0]["blocking"] == 0
    assert seen[0]["copies"] > 0
    pipe.close()


@pytest.mark.parametrize("how", ["call", "fill_drain", "1f1b"])
def test_a_failure_in_a_backward_leaves_nothing(how: str):
    """Pending copies to the device that no backward has used are ordered before later work."""
    places = [accelerator.device(0)] * 2
    layers, calls = deep(), list[int]()
    pipe = GPipe(layers, [1, 1], devices=places, chunks=CHUNKS, checkpoint="offload")
    x = torch.randn(CHUNKS * ROWS, WIDTH).to(places[0])

    def fail(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("in a backward")
        return gradient

    pipe.step(x, loss_fn=squares, reduction="sum")  # from here on there are gradients
    handle = layers[0].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
    before = accelerator.used()
    with accelerator.no_races():
        with pytest.raises(ValueError, match="in a backward"):
            train(pipe, x, how)
        assert accelerator.used() == before
        handle.remove()
        pipe.step(x, loss_fn=squares, reduction="sum")
    pipe.close()
