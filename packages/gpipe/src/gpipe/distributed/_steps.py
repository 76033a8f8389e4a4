"""Steps and evaluations that all ranks of a pipe run together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn

from .._chooser import build_own_choice
from ..engine._loss_value import LossValue, own_loss
from ..engine._losses import Losses
from ..engine._mini_batch import train
from ..engine._settings import settings
from ..module._keywords import Call, bind_arguments, get_mini_batch
from ..module._rule import Rule, choose_schedule_name, is_left_open
from ..module._step import Asked, Prepared, Stepping
from ..module._torch_losses import is_of_torch
from ..module._training import Unlike
from ..schedule import SCHEDULES, SPLITTING, Choice, Schedule
from ..schedule._named import expect_schedule
from ._agreement import METHOD
from ._deferred_signals import allow_signals, defer_signals
from ._digests import Digests
from ._groups import Group, end_collectives
from ._parallel import expect_parallel, find_shard_groups, find_sync_groups
from ._processes import RankProcesses, RunProposal
from ._remote_loss import RemoteLoss
from ._replicas import Replicas
from ._sharded import Sharding


class RankStepping(Stepping):
    """Prepare and run the steps of a :class:`gpipe.distributed.Rank`, which creates these attributes.

    Attributes:
        _group: the argument of that name.
        _members: the global ranks of the pipe's processes.
        _ranks: the process of each stage, as its index in the group.
        _trained: the stages with trained parameters, of all ranks.
        _synced: the layers that synchronize batch statistics, by name.
        _parallel: the process groups that layers communicate over in the current call.
        _averages: whether steps average gradients over the replicas.
        _last: the schedule of the last step.
    """

    _group: Group | None
    _members: tuple[int, ...]
    _ranks: list[int]
    _trained: list[int]
    _processes: RankProcesses
    _replicas: Replicas
    _sharding: Sharding
    _synced: dict[str, nn.SyncBatchNorm]
    _parallel: set[dist.ProcessGroup]
    _averages: bool
    _last: Choice | None

    def _prepare_call(self, call: Call, schedule: Schedule | str | None, scope: ExitStack) -> Prepared:
        """Prepare a step or an evaluation.

        Ranks without the first stage have only row counts as micro-batches. Ranks without the last stage have a
        :class:`RemoteLoss`.
        """
        scope.enter_context(defer_signals())  # until the end of the call
        with self._replicas.hearing(self._end_collectives) if call.trains else nullcontext():
            with self._opening(call.method, schedule) as found, allow_signals():
                self._expect_fit(call)
                asked = self._check_call(call, schedule, found)
                found.rows = Digests({"input": call.input, **call.arguments, "target": call.target})
            asked = asked._replace(batches=asked.batches or found.batches)
            if call.trains:
                self._last = self._choice(schedule, whole=found.whole)
            losses: Losses = self._remote_loss(asked, whole=found.whole)
            if self._pipeline.ends:
                try:
                    losses = self._losses(asked, scope, whole=found.whole)
                except Exception as error:
                    self._processes.call_off([error])
        return Prepared(asked.batches, self._size(len(asked.batches), trains=call.trains), losses, found.seed)

    def _check_call(self, call: Call, schedule: Schedule | str | None, found: RunProposal) -> Asked:
        """Check a call. On the rank of the first stage, split its inputs into the micro-batches of ``found``."""
        if not self._pipeline.begins:
            return Asked(call, schedule, get_mini_batch(call), [])
        asked = self._cut_for_loss(Asked(call, schedule, bind_arguments(self._end(0), call), []))
        found.batches = asked.batches
        found.whole = self._is_whole(asked, self._size(len(found.batches), trains=call.trains))
        return asked

    def _remote_loss(self, asked: Asked, *, whole: bool) -> RemoteLoss:
        return RemoteLoss(is_whole=whole)

    def _rule(self, asked: Asked) -> Rule | None:
        found, call = super()._rule(asked), asked.call
        if found is None and call.target is None and not self._pipeline.ends and is_of_torch(call.loss_fn):
            return Rule(own_loss, None)  # only the rank of the last stage has the target
        return found

    def _unlike(self, asked: Asked) -> Unlike:
        error, loss_fn = super()._unlike(asked), asked.call.loss_fn
        is_decided = loss_fn is None or loss_fn in self._sums or not is_left_open(asked.schedule)

        def unlike(value: LossValue) -> ValueError:
            return error(value) if is_decided or value.count is not None else ValueError(_DECIDED)

        return unlike

    def _end_collectives(self) -> None:
        """Close the connections that layers use for collectives, so that no process waits in one for this process.

        If there are any, no further step can start.
        """
        shared = [group for group in self._parallel if group.size() > 1]
        for group in shared:
            end_collectives(group)
        if shared:
            self._processes.leave()

    def _updates_by(self, optimizer: Any) -> NoReturn:
        raise ValueError(
            "optimizer= is for a GPipe in one process; gradients that ranks and replicas share are complete only at "
            "the end of a step: call optimizer.step() after step()"
        )

    def _train(self, prepared: Prepared, schedule: Schedule | str | None) -> None:
        assert self._last is not None
        own = schedule if isinstance(schedule, Schedule) else self._last
        batches, size, losses, seed, _ = prepared
        with self._replicas.hearing(self._end_collectives), self._sharding.reduced_once(losses):
            train(self._pipeline, self._pipeline.spec(size, own, losses, seed=seed), batches)
        if self._averages:
            self._replicas.average(self)
        else:
            self._replicas.skip_average()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in steps without averaging them over the replicas.

        The first step outside this context averages all accumulated gradients, as with
        ``DistributedDataParallel.no_sync``. All replicas use it in the same steps. Parameters that ``fully_shard`` has
        sharded are not affected; see ``set_requires_gradient_sync``.

        >>> with rank.no_sync():  # doctest: +SKIP
        ...     rank.step(x1, y1, loss_fn=loss_fn)
        >>> rank.step(x2, y2, loss_fn=loss_fn)  # doctest: +SKIP
        """
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before

    def _readers(self) -> set[int]:
        """Return the ranks that need the tensors of mini-batches, as indices in the group."""
        return {self._ranks[0], self._ranks[-1]}

    @contextmanager
    def _opening(self, method: str, schedule: Schedule | str | None = None) -> Iterator[RunProposal]:
        """Check the arguments of a call on each rank. The block creates the micro-batches on the first stage's rank.

        After the block, all ranks have the micro-batches' row counts.
        """
        with self._processes.begin_call() as found:
            self._expect_layers()
            found.must_match = self._call_to_match(method, schedule)
            parallel = find_sync_groups(self._synced) | find_shard_groups(self)
            self._parallel = set().union(*parallel.values())
            if method == "step":
                self._replicas.meeting.expect_open()
            if schedule is not None:
                _expect_schedule(schedule)
            self._sharding.expect_whole()
            expect_parallel(parallel, self._members)
            yield found

    def _choice(self, schedule: Schedule | str | None, *, whole: bool) -> Choice:
        """Return the schedule to run for ``schedule``. Nothing is measured, so ``"auto"`` means the default."""
        if isinstance(schedule, Schedule):
            return build_own_choice(schedule)
        name = choose_schedule_name(schedule, whole=whole, offloads=bool(self._offload)).lower()
        # The first trained stage sends no input gradient, so there is nothing to compute before its weight gradients.
        return Choice("1f1b" if name == "auto" else name, tuple(self._trained[1:]) if name in SPLITTING else ())

    def _call_to_match(self, method: str, schedule: Schedule | str | None) -> dict[str, Any]:
        """Return the values that must be equal on all ranks in a call, keyed by names for error messages."""
        return {
            METHOD: method,
            "schedule": None if schedule is None else str(schedule),
            "training": self.training,
            "chunks": self._chunks,
            "recording": settings().observer is not None,
        }


def _expect_schedule(schedule: object) -> None:
    if isinstance(schedule, str) and schedule.lower() == "search":
        raise ValueError(
            'schedule="search" is for a pipe in one process, because nothing is measured across processes; pass a '
            "Schedule that gpipe.simulate.search finds, the same on all ranks"
        )
    expect_schedule(schedule, (*SCHEDULES, "auto"))


_DECIDED = (
    "the rank of the first stage decides whether the loss is computed once. It got a different loss_fn, target or "
    "reduction= than the rank of the last stage, or none, and the rank of the last stage cannot determine how the "
    "losses of micro-batches add up; pass the same on both ranks"
)
