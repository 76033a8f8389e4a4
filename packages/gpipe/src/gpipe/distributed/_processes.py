"""The ranks of a pipe: what they agree on before a run, send each other in it, and report at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from ..engine._failures import Failures, When
from ..engine._losses import Losses
from ..engine._processes import Processes
from ..engine._run import Run
from ..engine._settings import RunObserver
from ..skip import SkipLayout
from ..transport._link import Channel
from ..values._describe import Cancelled
from ._agreement import expect_begun
from ._channels import Crossings, crossings_of
from ._errors import LostRankError, RemoteError, UnreachableError, text_of
from ._far_loss import FarLoss, verdict_of
from ._groups import Groups
from ._opening import Opening
from ._own import Share
from ._places import channels_between, ties_between
from ._random import take_seed
from ._rendezvous import Rendezvous, Report
from ._replicas import Replicas
from ._tied import Twins
from ._wires import open_wires

_BEFORE: Final[When] = (-1.0, -1)
"""The time of a failure before the first step of a run."""


class Ranks(Processes):
    """The ranks of a pipe, as one of them sees the others. Each takes its own steps of a common schedule.

    Args:
        share: the part of the model that this rank has.
        layout: the stages between which skips go.
        groups: the ranks, and the connections between them.
        ranks: the rank of each stage.
        replicas: the processes that end each step together with this one.
        told: by rank, what :meth:`Share.told` returned there.

    Raises:
        RuntimeError: a connection between accelerators could not be opened; see :func:`open_wires`.
    """

    ranks: tuple[int, ...]
    me: int

    def __init__(
        self,
        share: Share,
        layout: SkipLayout,
        groups: Groups,
        ranks: Sequence[int],
        replicas: Replicas,
        told: Sequence[Mapping[str, Any]],
    ) -> None:
        self.ranks, self.me = tuple(ranks), groups.me
        self._groups, self._rendezvous, self._replicas = groups, Rendezvous(groups, ranks[0]), replicas
        self._numbers = share.numbers
        devices = share.device_of
        places = [told[rank]["places"][j] for j, rank in enumerate(ranks)]
        channels, ties = channels_between(ranks, layout), ties_between(ranks, layout, share.ties)
        wires = open_wires(self._rendezvous, ranks, [*channels, *ties], devices, places, told[0]["name"])
        self._crossings = Crossings(crossings_of(groups, ranks, channels, devices, wires), wires)
        self._opening = Opening()
        tied = crossings_of(groups, ranks, ties, devices, wires)
        self._twins = Twins(share.twins, groups.me, {each.link.member: each.link for each in tied}, wires)
        self._closed = False
        with self._reaching():
            self._twins.spread_values()

    def channel(self, number: int, failures: Failures, loss: Losses | None) -> Channel | None:
        return self._crossings.channel(number, failures, loss)

    def shared(self, module: nn.Module) -> list[Tensor]:
        return self._twins.trained(module)

    def of_others(self) -> set[Tensor]:
        """The tensors of this rank that count as another's, which has a stage with them before the stages here."""
        return self._twins.of_others()

    def whole(self, run: Run) -> tuple[list[Tensor], list[Tensor]]:
        with self._reaching():
            found = self._twins.summed(run.parts(), self._numbers)
        return list(found), list(found.values())

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """A context for messages outside of a run, where ranks do not meet.

        If it fails, others may wait for this rank, and some may have received what they waited for. So no run begins
        any more, and the others hear why, where they wait for this rank now or in the next run.
        """
        try:
            yield
        except UnreachableError as error:
            lost = self._rendezvous.leave_without(error.member)
            self._crossings.end()
            raise lost from None
        except BaseException as error:
            if self._twins.are_there:  # the weights that ranks share may differ now
                failed = f"rank {dist.get_rank()} failed: {text_of(error)}"
                self._rendezvous.leave(LostRankError(f"{failed}; start the processes again, from the last checkpoint"))
                self._crossings.end()
            raise

    def close(self) -> None:
        """Close the connections to other ranks, by dropping all references to them. No run begins any more."""
        if not self._closed:
            self._closed = True
            self._replicas.close()
            del self._groups, self._rendezvous, self._crossings, self._twins

    def _expect_all(self) -> None:
        if self._closed:
            raise RuntimeError("this Rank was closed, and with it its connections to other ranks; make a new one")
        self._rendezvous.expect_open()

    def meet(self, report: Report, error: BaseException | None = None) -> list[Report]:
        """Send a report to all ranks, and return those of all; or find out who is lost, if ``error`` says that."""
        self._expect_all()
        try:
            if isinstance(error, UnreachableError):
                raise self._rendezvous.found_lost(error) from None
            return self._rendezvous.meet(report)
        except LostRankError:
            self._crossings.end()
            raise

    @contextmanager
    def opening(self) -> Iterator[Opening]:
        """A context for checks of this rank before a run.

        No rank waits for all others: the rank of the first stage goes on at once, and each other rank when it has
        received the announcement of the run. A rank that finds an error, or was given other arguments than the rank of
        the first stage, cancels the run; the others learn of it while they wait for a message, or at the end.

        Raises:
            RemoteError: another rank could not begin.
            ValueError: the ranks were given different arguments.
            LostRankError: a rank has ended, or does not answer.
        """
        self._expect_all()
        self._opening = Opening()
        error: BaseException | None = None
        report: Report = {}
        try:
            yield self._opening
        except BaseException as failed:
            error, report = failed, {"failed": True, "error": text_of(failed)}
        try:
            told = self._rendezvous.announced(None if error is not None else self._opening.told())
        except UnreachableError as lost:
            told, error = None, lost
        if told is not None and not self._rendezvous.is_root:
            self._opening.hear(told)
        if told is None and error is None:
            error, report = Cancelled(), {"failed": True}
        if error is None and self._opening.differs:
            error, report = Cancelled(), {"failed": True, "alike": self._opening.alike}
        if error is not None:
            self._crossings.expect(len(self._opening.batches), backwards=False)
            try:
                self._end(None, error, report)
            finally:
                del error
        self.seed = self._opening.seed

    @contextmanager
    def together(self, run: Run | None) -> Iterator[None]:
        """A context for a whole run: all ranks meet at its end, and learn whether another one has failed."""
        error: BaseException | None = None
        report: Report = {}
        trains = run is not None and run.keeps
        self._crossings.expect(len(self._opening.batches), backwards=trains)
        try:
            yield
            self._crossings.settle()  # before anything reads values that may not have arrived
            report = self._success(run)
        except BaseException as failed:
            error, report = failed, _failure(run, failed)
        try:
            self._end(run, error, report)
        finally:
            del error  # its traceback refers to this frame
        if trains:
            self._replicas.meet()

    def call_off(self, error: BaseException) -> NoReturn:
        """Cancel a run that all ranks have agreed on, because this one cannot begin it."""
        with self.together(None):
            raise error
        raise AssertionError("unreachable")

    def _success(self, run: Run | None) -> Report:
        """The report of a run that has not failed on this rank."""
        if run is None:
            return {}
        report: Report = {"drew": True} if run.rng.drew else {}
        if run.loss is not None and not isinstance(run.loss, FarLoss):
            report["verdict"] = verdict_of(run.loss)
        return report

    def _end(self, run: Run | None, error: BaseException | None, report: Report) -> None:
        when = _earliest(run)
        if error is not None and not isinstance(error, UnreachableError):
            self._crossings.poison(when)
            self._crossings.take()
        reports = self.meet(report, error)
        failed = [k for k, each in enumerate(reports) if "failed" in each]
        if failed and error is None:
            self._crossings.poison(when)
        if any(each.get("drew") for each in reports):
            take_seed()
        if not failed:
            self._learn(run, reports)
        self._tidy(drains=bool(failed))
        if failed:
            self._raise(error, reports)

    def _tidy(self, *, drains: bool) -> None:
        """Make sure that no message of this run is left for the next one to read."""
        with self._reaching():
            if drains:
                self._crossings.drain()
                self._crossings.settle()
            self._crossings.flush()

    def _learn(self, run: Run | None, reports: Sequence[Report]) -> None:
        """Take in what others have reported: the losses, and the records of a timeline."""
        if run is not None and run.observer is not None:
            self._share_events(run.observer)
        if run is not None and isinstance(run.loss, FarLoss):
            run.loss.verdict = reports[self.ranks[-1]]["verdict"]

    def _share_events(self, observer: RunObserver) -> None:
        now = time.perf_counter()  # all ranks leave a meeting at nearly the same moment
        for k, each in enumerate(self.meet({"events": observer.export_events(now)})):
            if k != self._groups.me:
                observer.import_events(each["events"], now)

    def _raise(self, error: BaseException | None, reports: Sequence[Report]) -> NoReturn:
        """Raise what kept a rank from beginning; else the failure that comes first in the schedule.

        It is this rank's own, or a RemoteError for another's.
        """
        if error is not None and "error" in reports[self._groups.me]:
            raise error
        expect_begun(reports, self._groups.members, self.ranks[0], self._opening.first)
        found = [(each["when"], k) for k, each in enumerate(reports) if "what" in each]
        k = min(found)[1]
        if k == self._groups.me and error is not None:
            raise error
        raise RemoteError(f"rank {self._groups.members[k]} failed: {reports[k]['what']}") from None


def _earliest(run: Run | None) -> When:
    """When the earliest failure of a run was due; that of one that has not begun comes first."""
    return _BEFORE if run is None else run.failures.earliest or _BEFORE


def _failure(run: Run | None, error: BaseException) -> Report:
    """The report of a failure."""
    report: Report = {"failed": True, "drew": run is not None and run.rng.drew}
    if not isinstance(error, Cancelled):
        report["when"] = list(_earliest(run))
        report["what"] = text_of(error)
    return report
