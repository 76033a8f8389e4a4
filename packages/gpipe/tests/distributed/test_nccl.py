"""Two GPUs with one process each send tensors over NCCL. These tests have never been run."""

import copy
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe.distributed import LostRankError, Rank, RemoteError

from ..worlds import World, world
from .planted import Planted

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not (dist.is_available() and dist.is_nccl_available()), reason="torch was built without NCCL"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    opened = World(2)
    yield opened
    opened.close()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(256, 256), Planted())


def shared(plain: nn.Sequential, **options: Any) -> Rank:
    """Return the rank of this process, on its own GPU."""
    torch.cuda.set_device(dist.get_rank())
    device = f"cuda:{dist.get_rank()}"
    return Rank(copy.deepcopy(plain), [2, 2, 2, 2], chunks=4, device=device, **options)


def step(rank: Rank, schedule: str = "1f1b") -> dict[str, Tensor]:
    """Train a step, and return the loss and the gradients of this rank."""
    rank.zero_grad()
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    loss = rank.step(x, loss_fn=lambda output: output.square().mean(), reduction="mean", schedule=schedule)
    return {"loss": loss.cpu(), **{name: p.grad.cpu() for name, p in rank.named_parameters()}}


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("schedule", ["fill_drain", "1f1b", "zero_bubble"])
def test_both_transports_give_equal_results(two: World, schedule: str, checkpoint: str):
    two.run(_expect_the_same, schedule, checkpoint)


def _expect_the_same(schedule: str, checkpoint: str) -> None:
    plain = network()
    direct = shared(plain, checkpoint=checkpoint)
    host = shared(plain, checkpoint=checkpoint, transport="host")
    for _ in range(3):
        found, wanted = step(direct, schedule), step(host, schedule)
        for name in wanted:
            assert torch.equal(found[name], wanted[name]), name


def test_after_a_failure_the_next_step_is_right(two: World):
    assert two.run(_fail) == ["RemoteError", "ArithmeticError"]


def _fail() -> str:
    rank = shared(network())
    wanted = step(rank)
    _set(rank, ArithmeticError)
    with pytest.raises((ArithmeticError, RemoteError)) as raised:
        step(rank)
    _set(rank, None)
    found = step(rank)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    return raised.type.__name__


def _set(rank: Rank, how: Any) -> None:
    for layer in rank.modules():
        if isinstance(layer, Planted):
            layer.when, layer.how = ("forward", 1) if how else None, how


def test_killed_rank_is_named():
    with world(2) as opened:
        (succeeded, text), (ended, _) = opened.answers(_lose)
    assert (succeeded, ended) == (True, False), text
    assert "rank 1 has ended, or did not answer within 10 s" in text


def _lose() -> str:
    rank = shared(network(), timeout=10.0)
    step(rank)
    _set(rank, signal.SIGKILL)
    with pytest.raises(LostRankError) as raised:
        step(rank)
    torch.cuda.synchronize()  # no unfinished transfer blocks it
    return str(raised.value)
