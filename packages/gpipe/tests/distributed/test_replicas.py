"""Replicas of a pipe: the failure of one rank is an error on all ranks of all replicas, and the next step is right."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gpipe.distributed import LostRankError, Rank, RemoteError, average_gradients

from ..worlds import world
from .planted import Planted, batch, expect_gradients, long_but, mesh_of_four, own_half, planted_in, shard
from .test_rendezvous import expect_named

SIZE = 4


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(2) for layer in (nn.Linear(6, 6), Planted(), nn.Tanh())]).double()


def _rank(mesh: Any, **options: Any) -> Rank:
    own = {"chunks": 3, "checkpoint": "always", "group": mesh["stages"].get_group(), **options}
    return Rank(_network(), [3, 3], replicas=mesh["replicas"].get_group(), **own)


def _step(rank: Rank, mesh: Any, **options: Any) -> None:
    rank.zero_grad()
    rank.step(*own_half(mesh, *batch(dtype=torch.float64)), loss_fn=nn.functional.mse_loss, **options)


def _expect_right(rank: Rank, mesh: Any, sharded: bool = False) -> None:
    _step(rank, mesh)
    if not sharded:
        average_gradients(rank, mesh["replicas"].get_group())
    plain, (x, y) = _network(), batch(dtype=torch.float64)
    nn.functional.mse_loss(plain(x), y).backward()
    expect_gradients(rank, plain)


FAILURES = [(who, phase) for who in range(SIZE) for phase in ("begin", "forward", "recompute", "backward")]


@pytest.mark.parametrize(
    "failures", [FAILURES[::5], pytest.param(FAILURES, marks=pytest.mark.long)], ids=["some", "all"]
)
@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt])
def test_a_failure_reaches_all_replicas(
    worlds: Any, kind: type[BaseException], failures: list[tuple[int, str]]
) -> None:
    for each in failures:
        worlds(SIZE).run(_fail_everywhere, kind, "", *each)


@pytest.mark.parametrize(("who", "phase"), long_but(FAILURES, (3, "forward")))
@pytest.mark.parametrize("sharded", [pytest.param("partitions", marks=pytest.mark.long), "layers"])
def test_where_stages_compute_together_no_step_begins_after_a_failure(sharded: str, who: int, phase: str) -> None:
    """Which reaches all replicas, also those that wait for each other in a layer."""
    with world(SIZE, timeout=600.0) as opened:
        opened.run(_fail_everywhere, ArithmeticError, sharded, who, phase)


def _fail_everywhere(kind: type[BaseException], sharded: str, who: int, phase: str) -> None:
    mesh = mesh_of_four()
    rank = _rank(mesh)
    if sharded:
        shard(rank, mesh, nested=sharded == "layers")
    _expect_right(rank, mesh, bool(sharded))
    _expect_on_all(rank, mesh, who, phase, kind)
    if not sharded:
        assert all(parameter.grad is None for parameter in rank.parameters())
        _expect_right(rank, mesh)
        return
    with pytest.raises((LostRankError, RemoteError), match="restart all processes"):
        _step(rank, mesh)


def _expect_on_all(rank: Rank, mesh: Any, who: int, phase: str, kind: type[BaseException]) -> None:
    """Where it fails its own error, elsewhere one that names the rank that has failed."""
    planted, fails = planted_in(rank), dist.get_rank() == who
    dist.barrier()
    planted.when, planted.how = ((phase, 2) if fails else None), kind
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        _step(rank, mesh, schedule="none such" if fails and phase == "begin" else "1f1b")
    assert caught.type is (RemoteError if not fails else ValueError if phase == "begin" else kind)
    assert fails or f"rank {who} " in str(caught.value)
    planted.when = None


def test_a_rank_of_another_replica_that_is_killed_is_named() -> None:
    expect_named(SIZE, (0, 3), _lose, signal.SIGKILL, 60.0)


@pytest.mark.long
def test_a_rank_of_another_replica_that_freezes_is_named_when_the_time_is_over() -> None:
    """Its own replica waits for ``timeout``, the other one up to four times as long."""
    expect_named(SIZE, range(SIZE), _lose, signal.SIGSTOP, 8.0)


def _lose(who: int, number: signal.Signals, timeout: float) -> str:
    mesh = mesh_of_four()
    rank = _rank(mesh, timeout=timeout)
    _expect_right(rank, mesh)
    if dist.get_rank() == who:
        os.kill(os.getpid(), number)
    with pytest.raises(LostRankError) as caught:
        _step(rank, mesh)
    with pytest.raises((LostRankError, RemoteError), match="has ended"):
        _step(rank, mesh)
    return str(caught.value)


@pytest.mark.parametrize("what", ["weight", "running_mean"])
def test_replicas_that_begin_with_other_weights_are_refused(worlds: Any, what: str) -> None:
    for text in worlds(2).run(_begin_apart, what):
        assert f"'1.{what}'" in text


def _begin_apart(what: str) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if dist.get_rank() == 1:
        with torch.no_grad():
            getattr(model[1], what)[2] += 0.5
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "stages"))
    with pytest.raises(ValueError, match="the ranks disagree: the checksum of") as caught:
        Rank(model, [2], group=mesh["stages"].get_group(), replicas=mesh["replicas"].get_group())
    return str(caught.value)
