"""Ranks on a mesh of processes: stages in one dimension, layers that are parallel themselves in the other."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpipe.distributed import Rank

from ..layers import Layer
from .planted import expect_gradients


def _block() -> Layer:
    """A layer that ``parallelize_module`` cuts; its output is that of a collective."""
    return Layer(lambda s, x: s.down(s.up(x).relu()), up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def _made(kind: str) -> tuple[nn.Sequential, Rank, Any]:
    """The plain model, this process's part of it on a mesh of four, and the dimension with other rows, if any."""
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
    "shards before": ((2, 2), ("pp", "dp")),  # before the rank is made
    "tp": ((2, 2), ("pp", "tp")),
    "shards and tp": ((1, 2, 2), ("pp", "dp", "tp")),
    "replicated shards": ((1, 2, 2), ("pp", "copies", "dp")),
}


def test_stages_of_parallel_layers_are_the_plain_model(worlds: Any) -> None:
    """Gradients and their norm; with ``replicas=`` the peers of a stage also take the same schedule."""
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
