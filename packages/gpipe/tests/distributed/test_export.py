"""Our stages and schedules in torch's own pipelining runtime, on two processes over gloo."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpipe import DeferredBatchNorm
from gpipe.distributed import export
from gpipe.schedule import Schedule

from ..layers import Call, Pop, Stash
from .planted import batch, network

OWN = "F0 F1 F2 F3 B1 B0 I3 B2 W3\nF0 F1 F2 F3 B1 B0 I3 B2 W3"


def forking() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    forks = [[Call(lambda x: (x.sin(), x.t())), Call(lambda both: both[0] + both[1].t())] for _ in range(2)]
    return nn.Sequential(first, *forks[0], nn.Linear(6, 6), *forks[1], last, nn.Tanh())


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    return nn.Sequential(
        first, nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), last, nn.Tanh()
    )


@pytest.mark.parametrize("make", [network, forking, normed])
@pytest.mark.parametrize(
    ("schedule", "balance"),
    [
        ("1f1b", [3, 5]),
        ("fill_drain", [2, 6]),
        ("zero_bubble", [2, 6]),
        ("interleaved", [2, 3, 1, 2]),
        ("interleaved_zero_bubble", [2, 3, 1, 2]),
        ("zbv", [2, 3, 1, 2]),
        (OWN, [2, 6]),
    ],
    ids=["1f1b", "fill_drain", "zero_bubble", "interleaved", "interleaved_zero_bubble", "zbv", "own"],
)
def test_gradients_are_those_of_the_plain_model(worlds, make: Any, schedule: str, balance: list[int]):
    worlds(2).run(_expect_as_plain, make, schedule, balance)


def _expect_as_plain(make: Any, schedule: str, balance: list[int]) -> None:
    model, plain, chunks = make(), make(), 4
    ranks = [0, 1, 1, 0] if schedule == "zbv" else None
    stages, runtime = export(
        model,
        balance,
        chunks=chunks,
        ranks=ranks,
        schedule=Schedule.parse(schedule) if "F0" in schedule else schedule,
        loss_fn=nn.functional.mse_loss,
    )
    x, y = batch(24)
    for _ in range(2):  # gradients add up, which torch's default would not leave as they are
        losses: list[Tensor] = []
        loss = _plain_step(plain, x, y, chunks)
        first, last = (any(getattr(stage, name) for stage in stages) for name in ("is_first", "is_last"))
        runtime.step(*([x] if first else []), target=y if last else None, losses=losses, return_outputs=False)
        if last:
            torch.testing.assert_close(sum(losses), loss, rtol=1e-6, atol=1e-6)
    _expect_alike(stages, plain)


def _plain_step(plain: nn.Module, x: Tensor, y: Tensor, chunks: int) -> Tensor:
    """Micro-batch by micro-batch, for batch norm."""
    pairs = zip(x.chunk(chunks), y.chunk(chunks), strict=True)
    loss = sum(nn.functional.mse_loss(plain(x), y) / chunks for x, y in pairs)
    assert isinstance(loss, Tensor)
    loss.backward()
    return loss.detach()


def _expect_alike(stages: list[Any], plain: nn.Module) -> None:
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    buffers = dict(plain.named_buffers())
    names = [name for stage in stages for name, _ in stage.submod.named_parameters()]
    assert names == [name for name in gradients if name in names]
    for stage in stages:
        for name, p in stage.submod.named_parameters():
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-6, atol=1e-6)
        for name, buffer in stage.submod.named_buffers():
            torch.testing.assert_close(buffer, buffers[name], rtol=1e-6, atol=1e-6)


def test_outputs_and_sums(worlds):
    worlds(2).run(_expect_outputs_and_sums)


def _expect_outputs_and_sums() -> None:
    plain = network()
    x, _ = batch(8)
    _, runtime = export(network(), [4, 4], chunks=4)
    found = runtime.step(*([x] if dist.get_rank() == 0 else []))
    if dist.get_rank() == 1:
        torch.testing.assert_close(found, plain(x))
    stages, runtime = export(network(), [4, 4], chunks=4, loss_fn=_summed, reduction="sum")
    (plain(x) - x).square().sum().backward()
    runtime.step(*([x] if dist.get_rank() == 0 else []), target=x if dist.get_rank() else None)
    _expect_alike(stages, plain)


LABELS = torch.tensor([0, -100, -100, 1, -100, 2, -100, -100, 4, 5, -100, 2])
LOSSES = {
    "labels": (nn.functional.cross_entropy, LABELS),
    "weights": (nn.CrossEntropyLoss(weight=torch.arange(6.0)), LABELS),
    "nothing": (nn.functional.cross_entropy, torch.full((12,), -100)),
    "elements": (nn.HuberLoss(), batch()[1]),
    "sum": (partial(nn.functional.l1_loss, reduction="sum"), batch()[1]),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_losses_of_torch_are_those_of_all_rows(worlds, loss: str, schedule: str):
    """Whatever counts in a micro-batch, and if that is nothing."""
    worlds(2).run(_expect_of_torch, loss, schedule)


def _expect_of_torch(loss: str, schedule: str) -> None:
    (loss_fn, target), (x, _), plain = LOSSES[loss], batch(), network()
    stages, runtime = export(network(), [4, 4], chunks=6, loss_fn=loss_fn, schedule=schedule)
    is_last = dist.get_rank() == 1
    for _ in range(2):
        expected, losses = loss_fn(plain(x), target), list[Tensor]()
        expected.backward()
        runtime.step(*([] if is_last else [x]), target=target if is_last else None, losses=losses)
        assert not is_last or torch.allclose(sum(losses), expected, equal_nan=True)
        losses.clear()
        runtime.eval(*([] if is_last else [x]), target=target if is_last else None, losses=losses)
        assert not is_last or torch.allclose(sum(losses), expected, equal_nan=True)
    _expect_alike(stages, plain)


def _of_all(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output @ target.T, torch.arange(len(output)))


def _summed(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


@pytest.mark.parametrize("value", [{"x": torch.ones(2)}, (torch.ones(2), None), (torch.ones(2),), None])
def test_values_that_torch_cannot_send(value: Any):
    from gpipe.distributed._torch_runtime import ExportedStage

    with pytest.raises(TypeError, match=r"stage 0 returns .* use gpipe.distributed.Rank"):
        ExportedStage(nn.Sequential(Call(lambda x: value)), 0, 2)(torch.ones(2, 2))


def test_what_torch_cannot_keep_is_refused_on_every_rank(worlds):
    worlds(2).run(_expect_refused)


def _expect_refused() -> None:
    model, loss = network(), nn.functional.mse_loss
    tied = network()
    tied[6].weight = tied[0].weight
    for arguments, message in [
        ({"ranks": [0, 0]}, "ranks: expected"),
        ({"schedule": "1b1f"}, "there is no schedule '1b1f'"),
        ({"schedule": Schedule.parse("F1 F0 B1 B0 \n F1 F0 B1 B0")}, r"order \[1, 0\], .*Rank"),
        ({"schedule": Schedule.parse("F0 F1 B1 B0 \n F0 F1 C B1 B0")}, r"has C, the loss of the whole.*Rank"),
        ({"reduction": "max", "loss_fn": loss}, "reduction must be"),
        ({"loss_fn": _of_all}, "loss_fn: it is not known how the losses of micro-batches add up.*Rank"),
    ]:
        with pytest.raises(ValueError, match=message):
            export(model, [4, 4], chunks=2, **arguments)
    with pytest.raises(ValueError, match=r"DeferredBatchNorm: .*use gpipe.distributed.Rank"):
        export(nn.Sequential(nn.Linear(6, 6), DeferredBatchNorm(6, chunks=2)), [1, 1], chunks=2)
    with pytest.raises(ValueError, match=r"skip 'skip' leads from partition 0 to 1: .*Rank"):
        export(nn.Sequential(Stash(), Pop()), [1, 1], chunks=2)
    with pytest.raises(ValueError, match="duplicate parameters in distinct partitions"):
        export(tied, [4, 4], chunks=2)
    _, runtime = export(model, [4, 4], chunks=4, loss_fn=partial(loss, reduction="none"))
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="how the losses of micro-batches of this target add up"):
            runtime.step(target=torch.ones(8, 6))
    _, runtime = export(model, [4, 4], chunks=4, loss_fn=loss)
    for rows in (13, 3, 0):
        with pytest.raises(ValueError, match=f"has {rows} rows, .* 4 micro-batches of one size; .*Rank"):
            _step(runtime, torch.ones(rows, 6))
    _step(runtime, torch.ones(8, 6))
    with pytest.raises(ValueError, match=r"\[12, 6\]\], but was .*\[8, 6\]\] in the first step"):
        _step(runtime, torch.ones(12, 6))


def _step(runtime: Any, x: Tensor) -> None:
    runtime.step(*([x] if dist.get_rank() == 0 else []), target=x if dist.get_rank() == 1 else None)


def test_replicas_and_split_backwards(worlds):
    worlds(2).run(_expect_replicas_refused)


def _expect_replicas_refused() -> None:
    alone = [dist.new_group([k]) for k in range(2)][dist.get_rank()]
    for schedule in ("zero_bubble", "1f1b"):
        plain = network()
        stages, runtime = export(network(), [4, 4], chunks=4, loss_fn=nn.functional.mse_loss, schedule=schedule)
        stages[0].submod = DistributedDataParallel(stages[0].submod, process_group=alone)
        if schedule == "zero_bubble":
            with pytest.raises(RuntimeError, match=r"DistributedDataParallel under a schedule that splits .*Rank"):
                _step(runtime, torch.ones(8, 6))
            continue
        _step(runtime, torch.ones(8, 6))
        _plain_step(plain, torch.ones(8, 6), torch.ones(8, 6), 4)
        stages[0].submod = stages[0].submod.module
        _expect_alike(stages, plain)
