"""Gradients of all ranks: their total norm, clipping by it, and an overflow on one rank."""

import copy
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe.distributed import GradScaler, Rank, average_gradients

from ..layers import Tied
from .planted import expect_gradients, mesh_of_four, shard

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    """Return a model with a weight shared by the first and the last stage, and a stage without parameters."""
    torch.manual_seed(0)
    first = nn.Linear(4, 4)
    return nn.Sequential(first, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Tied(first))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("how", ["one", "replicas", "sharded"])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_gradients_are_clipped_by_the_global_norm(worlds: Any, how: str, max_norm: float) -> None:
    """They match the plain model's gradients, even with replicas or shards. A shared weight counts once."""
    worlds(4).run(_expect_clipped, how, max_norm)


def _expect_clipped(how: str, max_norm: float) -> None:
    plain, options = network(), {}
    if how == "sharded":  # a shared weight cannot be sharded
        plain[4] = nn.Linear(4, 4)
    balance = [1, 1, 1, 2]
    if how != "one":
        mesh = mesh_of_four()
        options = {"group": mesh["stages"].get_group(), "replicas": mesh["replicas"].get_group()}
        balance = [2, 3]
    rank = Rank(copy.deepcopy(plain), balance, chunks=2, **options)
    if how == "sharded":
        shard(rank, mesh)
    rows = X if how == "one" else X[4 * mesh["replicas"].get_local_rank() :][:4]
    rank.step(rows, loss_fn=loss_of)
    if how == "replicas":
        average_gradients(rank, options["replicas"])
    loss_of(plain(X)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    torch.testing.assert_close(rank.clip_grad_norm_(max_norm), expected)
    expect_gradients(rank, plain)


def test_ranks_in_different_calls_raise(worlds: Any) -> None:
    """All ranks raise at once, whichever rank differs, and the next step and norm are correct."""
    worlds(3).run(_expect_in_order)


def _expect_in_order() -> None:
    plain = nn.Sequential(*[network()[0] for _ in range(3)])
    rank = Rank(copy.deepcopy(plain), [1, 1, 1], chunks=2)
    loss_of(plain(X)).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer = torch.optim.SGD(rank.parameters())
    calls = {
        "step": lambda: rank.step(X, loss_fn=loss_of),
        "evaluate": lambda: rank.evaluate(X, loss_fn=loss_of),
        "clip_grad_norm_": lambda: rank.clip_grad_norm_(1.0),
        "GradScaler.unscale_": lambda: GradScaler(rank).unscale_(optimizer),
    }
    for own, others in permutations(calls, 2):
        for who in range(3):
            with pytest.raises(ValueError, match=f"the method that is called is .*{own}") as told:
                calls[own if dist.get_rank() == who else others]()
            assert others in str(told.value)
            rank.zero_grad()
        rank.step(X, loss_fn=loss_of)
        torch.testing.assert_close(rank.clip_grad_norm_(1.0), norm)
        expect_gradients(rank, plain)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_all_ranks_skip_a_step_with_overflow(worlds: Any, who: int, unscales: bool) -> None:
    """They skip no other step, and have the same scale. The weights match the plain model's weights."""
    worlds(3).run(_expect_skipped, who, unscales)


def _expect_skipped(who: int, unscales: bool) -> None:
    plain = nn.Sequential(*[network()[0] for _ in range(3)])
    rank = Rank(copy.deepcopy(plain), [1, 1, 1], chunks=2)
    scaler = GradScaler(rank, init_scale=8.0, growth_interval=2)
    optimizer, other = (torch.optim.SGD(each.parameters(), 0.1) for each in (rank, plain))
    scales = []
    for k in range(4):
        optimizer.zero_grad()
        other.zero_grad()
        rank.step(X, loss_fn=lambda output: scaler.scale(loss_of(output)))
        if k == 1 and dist.get_rank() == who:
            next(rank.parameters()).grad[0, 0] = float("inf")
        if k == 2 and who == 2:
            optimizer.zero_grad()  # as on a rank whose layers were not used
        loss_of(plain(X)).backward()
        if k == 2 and who == 2:
            other.zero_grad()
        if unscales:
            scaler.unscale_(optimizer)
            norm = rank.clip_grad_norm_(1e-3)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
            if k not in (1, 2):
                torch.testing.assert_close(norm, expected)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if k != 1:
            other.step()
        for name, parameter in rank.named_parameters():
            torch.testing.assert_close(parameter, plain.get_parameter(name))
    assert scales == [8.0, 4.0, 4.0, 8.0]


def test_gradients_of_several_meshes_are_clipped(worlds: Any) -> None:
    """A stage may have full parameters, and parameters sharded over one or two meshes, with or without replicas."""
    for kind in ("tp", "tp and whole", "dp of some", "dp and tp"):
        worlds(4).run(_expect_clipped_meshes, kind)


def _expect_clipped_meshes(kind: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(4)]
    plain = nn.Sequential(*[layer for block in blocks for layer in (block, nn.LayerNorm(4))])
    shape, names = ((1, 2, 2), ("pp", "dp", "tp")) if kind == "dp and tp" else ((2, 2), ("pp", kind[:2]))
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    replicas = mesh["dp", "tp"]._flatten() if len(shape) == 3 else mesh[kind[:2]]
    ranks = [0, shape[0] - 1]
    rank = Rank(copy.deepcopy(plain), [4, 4], ranks=ranks, chunks=2, group=mesh["pp"], replicas=replicas)
    for partition in rank.partitions:
        for k, block in enumerate([layer for layer in partition if isinstance(layer, nn.Sequential)]):
            if "tp" in names and (k == 0 or kind != "tp and whole"):
                parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            if "dp" in names and (k == 0 or kind != "dp of some"):
                fully_shard(block, mesh=mesh["dp"])
    rows = X.chunk(2)[mesh["dp"].get_local_rank()] if "dp" in names else X
    for max_norm in (1e3, 1e-3):
        plain.zero_grad()
        rank.zero_grad()
        rank.step(rows, loss_fn=loss_of)
        loss_of(plain(X)).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        torch.testing.assert_close(rank.clip_grad_norm_(max_norm), expected)
        expect_gradients(rank, plain)
    rank.close()
