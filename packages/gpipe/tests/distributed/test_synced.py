"""Batch norm over replicas, in several stages, trains like the plain model on micro-batches of all replicas."""

import signal
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe.distributed import LostRankError, Rank, RemoteError, average_gradients

from ..worlds import world
from .planted import Planted, batch, expect_gradients, long_but, mesh_of_four, network, own_half, planted_in


class OnHost(nn.SyncBatchNorm):
    """Synchronized batch norm on the CPU, with as many collectives in forward and backward as on accelerators."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        import torch.distributed.nn.functional as collectives

        def mean(x: Tensor) -> Tensor:
            return collectives.all_reduce(x.mean(0), group=self.process_group) / self.process_group.size()

        if self.process_group is None:  # the plain model
            return nn.functional.batch_norm(input, None, None, self.weight, self.bias, training=True)
        centred = input - mean(input)
        return centred / (mean(centred.square()) + self.eps).sqrt() * self.weight + self.bias


def _network(group: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), OnHost(6, process_group=group), nn.Tanh())]
    return nn.Sequential(*layers).double()


PLACES = {
    "zero_bubble": [0, 1, 1, 0],
    "zbv": [0, 1, 1, 0],
    "1f1b": [0, 0, 1, 1],
    "fill_drain": [0, 1, 0, 1],
    "interleaved": [0, 1, 0, 1],
    "looped_bfs": [0, 1, 0, 1],
}


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("schedule", PLACES)
def test_batch_norm_over_replicas(worlds: Any, schedule: str, checkpoint: str) -> None:
    worlds(4).run(_expect_as_one, schedule, checkpoint)


def _expect_as_one(schedule: str, checkpoint: str) -> None:
    mesh = mesh_of_four()
    replicas = mesh["replicas"].get_group()
    options = {"group": mesh["stages"].get_group(), "replicas": replicas, "checkpoint": checkpoint}
    rank = Rank(_network(replicas), [3] * 4, ranks=PLACES[schedule], chunks=4, **options)
    plain, (x, y) = _network(), batch(24, torch.float64)
    for i in range(4):  # the i-th micro-batch of the 12 rows of each replica
        rows = torch.cat([torch.arange(3) + 3 * i, torch.arange(3) + 3 * i + 12])
        (nn.functional.mse_loss(plain(x[rows]), y[rows]) / 4).backward()
    for _ in range(2):
        rank.zero_grad()
        rank.step(*own_half(mesh, x, y), loss_fn=nn.functional.mse_loss, schedule=schedule)
        average_gradients(rank, replicas)
        expect_gradients(rank, plain)


@pytest.mark.parametrize("over", ["all", "stages", "shards"])
def test_collectives_over_other_stages_raise(over: str) -> None:
    """Stages with different layers never reach the collective. The same holds for parameters sharded over stages."""
    with world(4) as opened:  # a separate world: afterwards, connections of these groups are closed
        opened.run(_expect_refused, over)


def _expect_refused(over: str) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of_four()
    stages = mesh["stages"].get_group()
    model = network().double() if over == "shards" else _network(dist.group.WORLD if over == "all" else stages)
    rank = Rank(model, [len(model) // 2] * 2, group=stages, chunks=2)
    if over == "shards":
        fully_shard(rank.partitions[0], mesh=mesh["stages"])
    with pytest.raises((ValueError, RemoteError), match="computes over a group with rank"):
        rank.step(*batch(24, torch.float64), loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize("is_killed", [False, True], ids=["error", "killed"])
@pytest.mark.parametrize(("who", "phase"), long_but(product(range(4), ("forward", "backward")), (2, "forward")))
def test_failure_reaches_replicas_waiting_in_a_layer(who: int, phase: str, is_killed: bool) -> None:
    with world(4, timeout=600.0) as opened:
        answers = opened.answers(_fail_while_others_wait, who, phase, is_killed)
    for k, (succeeded, text) in enumerate(answers):
        assert succeeded != (is_killed and k == who), text
        if succeeded:
            assert text.startswith(f"rank {who} has ended" if is_killed else f"rank {who} failed: ArithmeticError")


def _fail_while_others_wait(who: int, phase: str, is_killed: bool) -> str:
    """Return the error of this rank, which names the failed rank. The next step must fail as well."""
    mesh, me = mesh_of_four(), dist.get_rank()
    replicas = mesh["replicas"].get_group()
    layers = [layer for _ in range(2) for layer in (nn.Linear(6, 6), Planted(), OnHost(6, process_group=replicas))]
    rank = Rank(nn.Sequential(*layers), [3, 3], chunks=3, group=mesh["stages"].get_group(), replicas=replicas)
    planted = planted_in(rank)
    rank.step(*batch(), loss_fn=nn.functional.mse_loss)
    planted.when = (phase, 1) if me == who else None
    planted.how = signal.SIGKILL if is_killed else ArithmeticError
    with pytest.raises((ArithmeticError, RemoteError, LostRankError)) as caught:
        rank.step(*batch(), loss_fn=nn.functional.mse_loss)
    with pytest.raises((LostRankError, RemoteError)):
        rank.step(*batch(), loss_fn=nn.functional.mse_loss)
    if me == who:
        return f"rank {who} failed: {caught.type.__name__}"
    return str(caught.value).removeprefix("another replica has failed: ")
