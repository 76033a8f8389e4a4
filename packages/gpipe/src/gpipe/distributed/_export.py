"""This process's stages for torch's own pipelining runtime, which can then run our schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._batchnorm import DeferredBatchNorm
from ..engine._walks import Size, walk_of
from ..module._arguments import Device, checked_chunks
from ..module._init import initializer_of
from ..module._partition import as_sequential, checked_balance, partitions_of, verify_module
from ..schedule import SCHEDULES, Choice, Kind, Schedule, Walk
from ..schedule._named import expect_schedule
from ..skip import inspect_skip_layout, verify_skippables
from ._groups import Group, expect_group
from ._own import own_share
from ._part_of_loss import PartOfLoss
from ._rank import checked_ranks


class Exported(NamedTuple):
    """The stages and the runtime of this process, as ``torch.distributed.pipelining`` needs them.

    Attributes:
        stages: a list of ``torch.distributed.pipelining.PipelineStage``; ``stage.submod`` has the layers under the
            names that they have in the model.
        runtime: torch's ``_PipelineScheduleRuntime``, with ``step`` and ``eval``.
    """

    stages: list[Any]
    runtime: Any


def export(
    module: nn.Module,
    balance: Iterable[int],
    *,
    sample: Any = None,
    chunks: int = 1,
    ranks: Iterable[int] | None = None,
    group: Group | None = None,
    device: Device | Sequence[Device] = "cpu",
    init: Any = None,
    schedule: Schedule | str = "1f1b",
    loss_fn: Callable[..., Tensor] | None = None,
    reduction: str | None = None,
) -> Exported:
    """Make the stages of this process for ``torch.distributed.pipelining``, and its runtime with one of our schedules.

    This is for programs that are written for torch's stages and schedules, such as torchtitan. Otherwise use
    :class:`gpipe.distributed.Rank`. Every process of the group calls this with the same arguments.

    Args:
        module, balance, sample, chunks, ranks, device, init: see :class:`gpipe.distributed.Rank`.
        group: the processes that take part, all by default. Torch sends over this group.
        schedule: a name, or one of your own, in which the loss is computed for each micro-batch.
        loss_fn: takes the output and the target of a micro-batch, and returns a tensor with one element. None if
            nothing is trained.
        reduction: how ``loss_fn`` reduces rows: ``"mean"`` or ``"sum"``. It need not be given for one of torch's
            losses, such as ``F.cross_entropy``. Other losses, of all rows, work in :class:`gpipe.distributed.Rank`.

    Returns:
        The stages and the runtime. ``runtime.step(x)`` on the first rank and ``runtime.step(target=y, losses=losses)``
        on the last add the gradients of the plain model to ``.grad``; the sum of ``losses`` is its loss.

    Raises:
        ImportError: this version of torch has no such runtime.
        RuntimeError: there is no process group, or this process is not in it.
        ValueError, TypeError: as :class:`gpipe.distributed.Rank`; or torch's runtime cannot do this, such as compute a
            loss of which is not known how those of micro-batches add up.

    >>> # torchrun --nproc-per-node 2 train.py
    >>> stages, runtime = export(model, [2, 1], chunks=4, loss_fn=loss_fn)  # doctest: +SKIP
    >>> runtime.step(*([x] if stages[0].is_first else []), target=y, losses=losses)  # doctest: +SKIP
    """
    runtime_of = _runtime_of()
    group = expect_group(group)
    chunks, initializer, layers = checked_chunks(chunks), initializer_of(init), as_sequential(module, sample)
    sizes = checked_balance(balance, len(layers))
    verify_skippables(layers)
    verify_module(layers, sizes)
    _expect_plain(layers, sizes)
    places = checked_ranks(ranks, len(sizes), dist.get_world_size(group))
    walk = _walk(schedule, chunks, places)
    part = None if loss_fn is None else PartOfLoss(loss_fn, chunks, reduction)
    share = own_share(layers, sizes, places, dist.get_rank(group), device, initializer)
    return Exported(*runtime_of(share, walk, chunks, part, group))


def _runtime_of() -> Callable[..., tuple[list[Any], Any]]:
    """Import torch's pipelining late: it takes time, and not every torch has it."""
    try:
        from ._torch_runtime import runtime_of
    except ImportError as error:
        raise ImportError(
            f"torch {torch.__version__} does not have the pipelining runtime that gpipe.distributed.export needs "
            f"({error}), which torch 2.13 has; use gpipe.distributed.Rank, which does not need it"
        ) from error
    return runtime_of


def _expect_plain(layers: nn.Sequential, sizes: Sequence[int]) -> None:
    if any(isinstance(each, DeferredBatchNorm) for each in layers.modules()):
        raise ValueError(
            "DeferredBatchNorm: torch's pipelining runtime does not say where a mini-batch ends; use "
            "gpipe.distributed.Rank, or plain batch norm"
        )
    for (_, name), source, target in inspect_skip_layout([*partitions_of(layers, sizes)]).routes:
        raise ValueError(
            f"skip {name!r} leads from partition {source} to {target}: torch's pipelining runtime sends between "
            "neighbours only; put both ends into one partition, or use gpipe.distributed.Rank"
        )


def _walk(schedule: Schedule | str, chunks: int, ranks: Sequence[int]) -> Walk:
    expect_schedule(schedule, SCHEDULES)
    every = tuple(range(len(ranks)))  # split where the schedule splits any backward: torch's runtime does not measure
    chosen = Choice(schedule.lower(), every) if isinstance(schedule, str) else schedule
    walk = walk_of(chosen, Size(chunks, tuple(ranks), (0,) * len(ranks)))
    if any(step.action.kind == Kind.LOSS for steps in walk for step in steps):
        raise ValueError(
            "schedule: it has C, the loss of the whole mini-batch, but torch's pipelining runtime computes a loss for "
            "each micro-batch; leave C out, or use gpipe.distributed.Rank"
        )
    steps = [step.action for step in walk[ranks[-1]] if step.stage == len(ranks) - 1]
    last = [action.microbatch for action in steps if action.kind == Kind.FORWARD]
    if last != sorted(last):
        raise ValueError(
            f"schedule: the last stage takes micro-batches in the order {last}, but torch's pipelining runtime takes "
            "its losses for those of micro-batches 0, 1, 2 and so on; put its forwards in order, or use "
            "gpipe.distributed.Rank"
        )
    return walk
