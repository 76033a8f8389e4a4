"""``DistributedDataParallel(pipe)`` trains as it does with the plain model: replicas stay equal."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gpipe import GPipe, LossSum

from ..layers import DOUBLE, Layer, assert_same, linears, piped
from ..worlds import world

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


def batch(step: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(rows, 3, dtype=DOUBLE, generator=generator)


def pair(model: nn.Sequential, mode: str, chunks: int = 3, **options: Any) -> list[DistributedDataParallel]:
    pipe = piped(model, [2, len(model) - 2], chunks=chunks, checkpoint=mode)
    return [DistributedDataParallel(each, **options) for each in (pipe, model)]


def squares(output: Tensor, _: Any = None) -> Tensor:
    return output.square().mean()


def expect_alike(*replicas: nn.Module) -> None:
    """Check that gradients, and parameters in both processes, are equal; then take a step."""
    assert_same(*replicas)
    for parameter in replicas[0].parameters():
        both = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(both, parameter.detach())
        assert torch.equal(*both), "replicas drift"
    for each in replicas:
        torch.optim.SGD(each.parameters(), 0.1).step()
        each.zero_grad()


def changing_batches(modes: list[str]) -> None:
    options = [{"static_graph": True}, {}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]
    for mode, option in product(modes, options):
        ddp, plain = pair(linears(4), mode, **option)
        for step, rows in enumerate((6, 6, 1, 2, 6)):
            for each in (ddp, plain):
                decay = sum(p.square().sum() for p in each.parameters()) if step % 2 and not option else 0
                (squares(each(batch(step, rows))) + decay).backward()
            expect_alike(ddp, plain)
        ddp.module.close()


def unused(modes: list[str]) -> None:
    """A layer uses its second part for some inputs only."""
    for mode in modes:
        first, *two, last = linears(4)
        sometimes = Layer(lambda s, x: s.m[0](x) + (s.m[1](x) if x.sum() > 0 else 0), *two)
        ddp, plain = pair(nn.Sequential(first, sometimes, last), mode, chunks=1, find_unused_parameters=True)
        for step in range(6):
            for each in (ddp, plain):
                squares(each(batch(step, 4))).backward()
            expect_alike(ddp, plain)
        ddp.module.close()


def stepped(_: list[str]) -> None:
    ddp, plain = pair(linears(4), "except_last")
    with pytest.raises(RuntimeError, match="DistributedDataParallel around this pipe"):
        ddp.module.step(batch(0, 6), loss_fn=squares)
    for reduction in ("mean", None):  # per micro-batch, and on the full batch
        with ddp.no_sync(), plain.no_sync():
            ddp.module.step(batch(1, 6), loss_fn=squares, reduction=reduction)
            squares(plain(batch(1, 6))).backward()
        for each in (ddp, plain):
            squares(each(batch(2, 2))).backward()
        expect_alike(ddp, plain)
    ddp.module.close()


def reentrant(_: list[str]) -> None:
    first, last = linears(2)
    again = Layer(lambda s, x: checkpoint(s.m[0], x, use_reentrant=True), last)
    pipe = GPipe(nn.Sequential(first, again), [1, 1], devices=["cpu"] * 2, chunks=2)
    pipe.step(batch(0, 4), loss_fn=lambda output: LossSum(output.sum(), 8))  # no wrapper waits for these gradients
    ddp = DistributedDataParallel(pipe, static_graph=True)
    with pytest.raises(RuntimeError, match="use use_reentrant=False"):
        ddp(batch(0, 4)).sum().backward()
    pipe.close()


@pytest.mark.parametrize("modes", [["except_last"], pytest.param(["never", "always"], marks=pytest.mark.long)])
def test_data_parallel_over_two_processes(modes: list[str]):
    """Covers varying numbers of micro-batches, unused parameters, and the error of ``step()``."""
    with world(2) as ranks:
        for check in (changing_batches, unused, stepped, reentrant):
            ranks.run(check, modes)
