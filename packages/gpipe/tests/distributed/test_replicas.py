"""Replicas of a pipe: if one rank fails, all ranks of all replicas raise, and the next step is correct."""

import copy
import os
import signal
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gpipe.distributed import LostRankError, Rank, RemoteError, average_gradients

from ..worlds import world
from .planted import Planted, batch, expect_gradients, long_but, mesh_of_four, own_half, planted_in, shard
from .test_object_exchange import expect_named

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
def test_sharded_replicas_stop_after_a_failure(sharded: str, who: int, phase: str) -> None:
    """The failure reaches all replicas, even if they wait for each other in a layer."""
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
    """Expect the error itself on the rank that fails, and an error that names this rank on all others."""
    planted, fails = planted_in(rank), dist.get_rank() == who
    dist.barrier()
    planted.when, planted.how = ((phase, 2) if fails else None), kind
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        _step(rank, mesh, schedule="none such" if fails and phase == "begin" else "1f1b")
    assert caught.type is (RemoteError if not fails else ValueError if phase == "begin" else kind)
    assert fails or f"rank {who} " in str(caught.value)
    planted.when = None


def test_killed_rank_of_a_replica_is_named() -> None:
    expect_named(SIZE, (0, 3), _lose, signal.SIGKILL, 60.0)


@pytest.mark.long
def test_frozen_rank_of_a_replica_is_named() -> None:
    """Its own replica waits for ``timeout``, and the other replica up to four times as long."""
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
def test_replicas_with_different_weights_raise(worlds: Any, what: str) -> None:
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


def test_replicas_train_as_one(worlds: Any) -> None:
    """Steps average gradients without further calls. With ``no_sync``, only the last of several steps does."""
    worlds(SIZE).run(_expect_one)


def _expect_one() -> None:
    mesh = mesh_of_four()
    rank, plain, (x, y) = _rank(mesh), _network(), batch(dtype=torch.float64)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (plain, rank)]
    for quiet in (0, 2, 0):
        for k in range(quiet + 1):
            with rank.no_sync() if k < quiet else nullcontext():
                rank.step(*own_half(mesh, x, y), loss_fn=nn.functional.mse_loss)
            nn.functional.mse_loss(plain(x), y).backward()
        expect_gradients(rank, plain)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(rank.clip_grad_norm_(0.5), norm.float())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in rank.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(name))
        both = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(both, parameter.detach(), group=mesh["replicas"].get_group())
        assert torch.equal(*both)


def test_late_error_reaches_averaging_replicas(worlds: Any) -> None:
    found = worlds(2).run(_fail_late)
    assert found[0] == "ArithmeticError: planted"
    assert found[1].startswith("RemoteError: another replica has failed: rank 0 failed: ArithmeticError: planted")


def _fail_late() -> str:
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "stages"))
    torch.manual_seed(0)
    rank = Rank(nn.Sequential(nn.Linear(6, 6)), [1], group=mesh["stages"], replicas=mesh["replicas"])
    handle = None
    if dist.get_rank() == 0:  # the hook runs when the gradient is written
        handle = next(rank.parameters()).register_post_accumulate_grad_hook(_raise)
    x = torch.ones(4, 6)
    try:
        rank.step(x, loss_fn=lambda output: output.square().mean(), reduction="mean")
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if handle is not None:
        handle.remove()
    rank.zero_grad()
    rank.step(x, loss_fn=lambda output: output.square().mean(), reduction="mean")
    return found


def _raise(parameter: nn.Parameter) -> None:
    raise ArithmeticError("planted")


def test_parameters_on_different_meshes(worlds: Any) -> None:
    """Parameters may be full, or sharded over the replicas, some of the replicas, or other processes."""
    worlds(SIZE).run(_expect_meshes)


def _expect_meshes() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    for replicas in ("dp", "both"):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), nn.LayerNorm(6)).double()
        group = mesh["dp"] if replicas == "dp" else mesh["dp", "tp"]._flatten()
        rank = Rank(copy.deepcopy(plain), [2], chunks=2, group=mesh["pp"], replicas=group)
        cut = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(rank.partitions[0][0], mesh["tp"], cut)
        x, y = batch(dtype=torch.float64)
        own = [each.chunk(2)[mesh["dp"].get_local_rank()] for each in (x, y)]
        if replicas == "both":
            with pytest.raises(ValueError, match=r"is sharded over rank .*no_sync"):
                rank.step(*own, loss_fn=nn.functional.mse_loss)
            rank.zero_grad()
            with rank.no_sync():
                rank.step(*own, loss_fn=nn.functional.mse_loss)
            average_gradients(rank, mesh["dp"])
        else:
            rank.step(*own, loss_fn=nn.functional.mse_loss)
        nn.functional.mse_loss(plain(x), y).backward()
        expect_gradients(rank, plain)
