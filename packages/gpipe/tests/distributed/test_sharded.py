"""Sharded stages train like one model on the full batch, with every schedule and checkpoint mode."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gpipe
from gpipe import LossSum
from gpipe.distributed import Rank, load, save

from ..layers import Layer, Tied
from .planted import batch, expect_gradients, mesh_of_four, own_half, shard

STAGES = {"two": ([3, 4], [0, 1]), "v": ([2, 1, 2, 2], [0, 1, 1, 0])}


class Counts(nn.Module):
    """The identity. It counts recomputations."""

    recomputed = 0

    def forward(self, x: Tensor) -> Tensor:
        Counts.recomputed += gpipe.is_recomputing()
        return x * 1.0


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.GELU()), nn.Linear(6, 6)]
    return nn.Sequential(*layers, Counts(), nn.Linear(6, 6)).double()


def _counted(output: Tensor, target: Tensor) -> LossSum:
    return LossSum((output - target).square().sum(), output.numel())


LOSSES: dict[str, Callable[..., Any]] = {"mean": nn.functional.mse_loss, "counted": _counted}


def sharded(stages: str, nested: bool = False, mp_policy: Any = None, **options: Any) -> tuple[Rank, Any]:
    """Return a rank of one of two replicas, and the mesh."""
    mesh = mesh_of_four()
    balance, ranks = STAGES[stages]
    rank = Rank(network(), balance, ranks=ranks, group=mesh["stages"], replicas=mesh["replicas"], **options)
    shard(rank, mesh, nested=nested, **({} if mp_policy is None else {"mp_policy": mp_policy}))
    return rank, mesh


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain", "zero_bubble"])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("nested", [False, True], ids=["partitions", "layers"])
def test_sharded_stages_match_the_plain_model(
    worlds: Any, stages: str, schedule: str, checkpoint: str, loss: str, nested: bool
) -> None:
    worlds(4).run(_expect_like_the_plain_model, stages, schedule, checkpoint, loss, nested)


def _expect_like_the_plain_model(stages: str, schedule: str, checkpoint: str, loss: str, nested: bool) -> None:
    rank, mesh = sharded(stages, nested, chunks=3, checkpoint=checkpoint)
    plain, (x, y) = network(), batch(dtype=torch.float64)
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (plain, rank)]
    for _ in range(2):
        for _ in range(2):  # gradients accumulate over steps
            nn.functional.mse_loss(plain(x), y).backward()
            Counts.recomputed = 0
            with _reductions() as reduced:
                rank.step(*own_half(mesh, x, y), loss_fn=LOSSES[loss], schedule=schedule)
            assert len(reduced) == len({*reduced}) > 0
            has_it = any(isinstance(module, Counts) for module in rank.modules())
            assert Counts.recomputed == (3 if checkpoint == "always" and has_it else 0)
        expect_gradients(rank, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in rank.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), plain.get_parameter(name))


@contextmanager
def _reductions() -> Iterator[list[int]]:
    """Yield a list of the ids of parameters that are reduced in the block, once per reduction."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

    reduced: list[int] = []
    original = module.foreach_reduce

    def counted(parameters: Any, *arguments: Any, **options: Any) -> Any:
        reduced.extend(map(id, parameters))
        return original(parameters, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "foreach_reduce", counted)
        yield reduced


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("waits", [False, True])
def test_gradients_reduced_in_a_different_dtype(worlds: Any, loss: str, waits: bool) -> None:
    """``fully_shard`` then accumulates micro-batches, and steps without a reduction, in the dtype of the reduction."""
    worlds(4).run(_expect_reduced_in_another_dtype, loss, waits)


def _expect_reduced_in_another_dtype(loss: str, waits: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    rank, mesh = sharded("two", chunks=3, mp_policy=policy)
    plain, (x, y) = network(), batch(dtype=torch.float64)
    for last in (False, True):
        nn.functional.mse_loss(plain(x), y).backward()
        for partition in rank.partitions:
            partition.set_requires_gradient_sync(last or not waits)
        # The stages compute in float32, and some versions of torch have no loss for mixed dtypes.
        rank.step(*own_half(mesh, x, y.float()), loss_fn=LOSSES[loss])
    for name, parameter in rank.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_sharded_state_is_saved_and_loaded(tmp_path: Any, worlds: Any) -> None:
    """Sharded ranks save for one process, and one process saves for sharded ranks."""
    path = str(tmp_path / "checkpoint")
    worlds(4).run(_save, path)
    plain = network()
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2)
    load(path, plain, optimizer)
    expected, (x, y) = network(), batch(dtype=torch.float64)
    own = torch.optim.AdamW(expected.parameters(), 1e-2)
    for model, each, steps in ((expected, own, 2), (plain, optimizer, 1)):
        for _ in range(steps):
            each.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            each.step()
    torch.testing.assert_close(plain.state_dict(), expected.state_dict())
    save(path, plain, optimizer)
    for state in worlds(4).run(_loaded, path):
        for name, (value, moment) in state.items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach())
            torch.testing.assert_close(moment, optimizer.state[plain.get_parameter(name)]["exp_avg"])


def _trainable() -> tuple[Rank, Any, Any]:
    rank, mesh = sharded("two", chunks=3)
    return rank, torch.optim.AdamW(rank.parameters(), 1e-2), mesh


def _save(path: str) -> None:
    rank, optimizer, mesh = _trainable()
    rank.step(*own_half(mesh, *batch(dtype=torch.float64)), loss_fn=nn.functional.mse_loss)
    optimizer.step()
    save(path, rank, optimizer)


def _loaded(path: str) -> dict[str, tuple[Tensor, Tensor]]:
    rank, optimizer, _ = _trainable()
    load(path, rank, optimizer)
    return {
        name: (p.full_tensor().detach(), optimizer.state[p]["exp_avg"].full_tensor())
        for name, p in rank.named_parameters()
    }


@pytest.mark.parametrize("ranks", [[0, 1, 1], [0, 1, 0]])
def test_sharding_a_shared_parameter_raises(worlds: Any, ranks: list[int]) -> None:
    for succeeded, text in worlds(2).answers(_shard_shared, ranks):
        assert not succeeded
        assert ".weight' is shared by several stages, and fully_shard" in text


def _shard_shared(ranks: list[int]) -> None:
    from torch.distributed.fsdp import fully_shard

    layer = nn.Linear(6, 6)
    rank = Rank(nn.Sequential(layer, nn.Linear(6, 6), Tied(layer)), [1, 1, 1], ranks=ranks)
    alone = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "replicas"))["replicas"]
    for partition in rank.partitions:
        fully_shard(partition, mesh=alone)
    x = torch.randn(4, 6)
    rank.step(x, x, loss_fn=nn.functional.mse_loss)


def _block() -> Layer:
    """Return a layer that ``parallelize_module`` can split. A collective then computes its output."""
    return Layer(lambda s, x: s.down(s.up(x).relu()), up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def _made(kind: str) -> tuple[nn.Sequential, Rank, Any]:
    """Return the plain model, its rank on a mesh of four processes, and the mesh dimension that splits rows, if any."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    plain = nn.Sequential(*[_block() for _ in range(4)])
    shape, names = MESHES[kind]
    model = copy.deepcopy(plain)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    replicas = mesh[names[1]] if len(names) == 2 else mesh[names[1:]]._flatten("replicas")
    rows = None if kind == "tp" else replicas if kind == "replicated shards" else mesh["dp"]
    for layer in model if kind == "shards before" else ():
        fully_shard(layer, mesh=mesh["dp"])
    rank = Rank(model, [2, 2], ranks=[0, shape[0] - 1], chunks=2, group=mesh["pp"], replicas=replicas)
    for partition in rank.partitions:
        for layer in partition:
            if "tp" in names:
                parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if kind == "shards of layers":
                fully_shard(layer, mesh=mesh["dp"])
        if kind not in ("tp", "shards before"):
            fully_shard(partition, mesh=mesh["copies", "dp"] if kind == "replicated shards" else mesh["dp"])
    return plain, rank, rows


MESHES: dict[str, Any] = {
    "shards": ((2, 2), ("pp", "dp")),
    "shards of layers": ((2, 2), ("pp", "dp")),
    "shards before": ((2, 2), ("pp", "dp")),  # before the rank is created
    "tp": ((2, 2), ("pp", "tp")),
    "shards and tp": ((1, 2, 2), ("pp", "dp", "tp")),
    "replicated shards": ((1, 2, 2), ("pp", "copies", "dp")),
}


def test_parallel_layers_match_the_plain_model(worlds: Any) -> None:
    """Gradients and their norm match. With ``replicas=``, the peers of a stage also choose the same schedule."""
    for kind in MESHES:
        worlds(4).run(_expect_plain, kind)


def _expect_plain(kind: str) -> None:
    plain, rank, rows = _made(kind)
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    k, parts = (0, 1) if rows is None else (rows.get_local_rank(), rows.size())
    for schedule in ("1f1b", "zero_bubble", "auto"):
        plain.zero_grad()
        rank.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        own = x.chunk(parts)[k], y.chunk(parts)[k]
        expected = nn.functional.mse_loss(plain(own[0]), own[1])
        found = rank.step(*own, loss_fn=nn.functional.mse_loss, schedule=schedule)
        torch.testing.assert_close(found, expected.detach())
        expect_gradients(rank, plain)
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(rank.clip_grad_norm_(0.1), norm)
    expect_gradients(rank, plain)
