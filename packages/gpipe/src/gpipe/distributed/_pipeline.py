"""The stages of a rank, as the engine sees them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from microbatch import Batch

from ..engine._losses import Losses
from ..engine._piecewise import whole_stages
from ..engine._pipeline import Pipeline
from ..engine._run import Run
from ..engine._settings import RunObserver
from ..engine._stage import Stage
from ..engine._walks import Size, forwards_and_backwards, walk_of
from ..engine._workers import Workers
from ..schedule import SPLITTING, Choice, Kind, Schedule, Step, Walk, program_of
from ..transport._channels import Connect, Nearby
from ..values._describe import Cancelled
from ..values._leaves import Activation
from ._agreement import expect_alike
from ._channels import Crossings, Reach
from ._choosing import RankChooser
from ._connected import Connected
from ._errors import LostRankError, RemoteError, UnreachableError, text_of
from ._failures import BEFORE, RankFailures
from ._far_loss import FarLoss
from ._groups import Groups
from ._messages import Peer
from ._opening import Opening
from ._places import ties_between
from ._random import AgreedRNG, take_seed
from ._rendezvous import Rendezvous, Report
from ._replicas import Replicas
from ._texts import Announcements
from ._tied import Twin, Twins, ways_of
from ._verdict import verdict_of, written

_ANNOUNCED = 0
"""The tag of announcements; those of channels are from 2 on."""


class RankPipeline(Pipeline):
    """The stages of one rank. Every rank walks its steps of the same walk, on the caller's thread.

    Args:
        connected: the stages of this rank, and how they are connected to those of others.
        workers: as for any pipeline.
        groups: the ranks, and over what they talk.
        ranks: that of each partition.
        rendezvous: where the ranks meet.
        replicas: who ends each step together with this one.
        twins: tensors that other ranks have too.
        trained: by rank, the partitions with parameters to train.

    Attributes:
        loss: of the run that is under way.
        chooser: of schedules.
        begins, ends: whether the first and the last stage are here.
    """

    threads = None

    def __init__(
        self,
        connected: Connected,
        workers: Workers,
        groups: Groups,
        ranks: Sequence[int],
        rendezvous: Rendezvous,
        replicas: Replicas,
        twins: Sequence[Twin],
        trained: Sequence[Sequence[int]],
    ) -> None:
        stages, layout, streams, of_stages, ties, wires = connected
        super().__init__(stages, layout, streams, workers)
        self.count, self.connected = len(ranks), len(of_stages)
        self.line = groups.me
        self.begins = ranks[0] == groups.me
        self.ends = ranks[-1] == groups.me
        self._ranks = tuple(ranks)
        self._groups = groups
        self._rendezvous = rendezvous
        self._replicas = replicas
        devices = dict(zip([stage.index for stage in stages], self.devices, strict=True))
        self._crossings = Crossings(groups, of_stages, layout, devices, wires)
        hearers = [k for k in range(len(groups.members)) if k != ranks[0]] if self.begins else [ranks[0]]
        peers = [Peer(groups.values, k, _ANNOUNCED) for k in hearers]
        self._announcements = Announcements(peers, tells=self.begins)
        self.chooser = RankChooser(whole_stages(stages), groups.me, trained)
        self._opening = Opening()
        self._trains = False
        self._rng = AgreedRNG(0)
        ways = ways_of(groups, of_stages, ties_between(of_stages, layout, ties), devices, wires)
        self._twins = Twins(twins, groups, ways, wires)
        self._lost: LostRankError | None = None
        self._closed = False
        with self._reaching():
            self._twins.spread_values()

    @property
    def placement(self) -> tuple[int, ...]:
        return self._ranks

    @property
    def lines(self) -> tuple[int, ...]:
        return self._ranks

    def walk(self, schedule: Schedule | Choice, size: Size) -> Walk:
        self._failures.whole = partial(walk_of, schedule, *size)
        if isinstance(schedule, Schedule):
            return walk_of(schedule, *size)
        return self._alone(_program(schedule.name, size, self.line, schedule.split))

    def halves(self, size: Size) -> tuple[Walk, Walk]:
        """The forwards; backwards are for :meth:`train` alone."""
        self._failures.whole = partial(_forwards, size)
        program = _program("fill_drain", size, self.line, ())
        return self._alone(tuple(step for step in program if step.action.kind == Kind.FORWARD)), ()

    def _alone(self, program: tuple[Step, ...]) -> Walk:
        """A walk in which only this rank does something."""
        return (*[()] * self.line, program)

    def random_numbers(self) -> AgreedRNG:
        return self._rng

    def failures(self) -> RankFailures:
        return self._failures

    def connect(self, nearby: Nearby, failures: Any) -> Connect:
        return Reach(nearby, self._crossings, failures, self.loss)

    def entering(self, batches: Sequence[Batch]) -> list[Activation]:
        return super().entering(batches) if self.begins else []

    def tied_elsewhere(self, stage: Stage) -> list[Tensor]:
        return self._twins.trained(stage.module)

    def whole(self, run: Run) -> tuple[list[Tensor], list[Tensor]]:
        leaves, whole = run.whole()
        with self._reaching():
            found = self._twins.summed(dict(zip(leaves, whole, strict=True)))
        return list(found), list(found.values())

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Around messages outside of a run."""
        try:
            yield
        except UnreachableError as error:
            raise self._lose(self._rendezvous.lost([error.member])) from None

    def _lose(self, error: LostRankError) -> LostRankError:
        """Remember that somebody is lost; there is no next run."""
        self._lost = error
        self._crossings.end()
        return error

    def close(self) -> None:
        """End the connections to other ranks: gloo ends them with the last reference. There is no next run."""
        if not self._closed:
            self._closed = True
            self._replicas.close()
            del self._groups, self._rendezvous, self._crossings, self._announcements, self._twins

    def _expect_all(self) -> None:
        if self._closed:
            raise RuntimeError("this Rank was closed, and with it its connections to other ranks; make a new one")
        if self._lost is not None:
            raise LostRankError(str(self._lost))

    def _meet(self, report: Report) -> list[Report]:
        """Send a report to all ranks; those of all."""
        self._expect_all()
        try:
            return self._rendezvous.meet(report)
        except LostRankError as error:
            self._lose(error)
            raise

    @contextmanager
    def opening(self) -> Iterator[Opening]:
        """Around what this rank checks by itself before a run.

        No rank waits for all others. That of the first stage goes on at once, and the others when they have heard of
        the run from it. Whoever has an error, or has been given something else than that rank, gives the run up, and
        the others hear of it where they wait, or at the end.

        Raises:
            RemoteError: another rank could not begin.
            ValueError: the ranks have been given different things.
            LostRankError: a rank has ended, or does not answer.
        """
        self._expect_all()
        self._opening, self._failures = Opening(), RankFailures()
        self.loss: Losses | None = None
        error: BaseException | None = None
        report: Report = {}
        try:
            yield self._opening
        except BaseException as failed:
            error, report = failed, {"failed": True, "error": text_of(failed)}
        try:
            self._announce(failed=error is not None)
        except (Cancelled, UnreachableError) as failed:
            error, report = (failed, self._failure(failed)) if error is None else (error, report)
        if error is None and self._opening.differs:
            error, report = Cancelled(), {"failed": True, "alike": self._opening.alike}
        if error is not None:
            self._crossings.expect(0, backwards=False)
            try:
                self._end(None, error, report)
            finally:
                del error

    def _announce(self, *, failed: bool) -> None:
        """Let all know what the rank of the first stage does; raises :class:`Cancelled` if that has failed."""
        if self.begins:
            self._announcements.tell(None if failed else self._opening.told())
        else:
            told = self._announcements.hear()
            if told is None:
                raise Cancelled
            self._opening.hear(told)

    def begin(self, loss: Losses | None, *, backwards: bool) -> None:
        """The run of which this rank has heard begins."""
        self._rng = AgreedRNG(self._opening.seed)
        self.loss = loss
        self._trains = backwards
        self._crossings.expect(len(self._opening.batches), backwards=backwards)

    def outputs(self, batches: Sequence[Batch]) -> list[Activation]:
        """Put each micro-batch through all stages, without gradients; what comes out, where the last stage is."""
        with self.workers.section.entered(), torch.no_grad():
            run = Run(self, len(batches), (0,) * self.count)
            try:
                with self.together(run):
                    entering = self.entering(batches)
                    if self.ends:
                        return run.forward(entering)
                    run.evaluate(entering)
                    return []
            finally:
                self._keep(run)

    @contextmanager
    def together(self, run: Run | None) -> Iterator[None]:
        """Around all that a run does: every rank comes to its end, and hears whether another one has failed there."""
        error: BaseException | None = None
        report: Report = {}
        try:
            yield
            self._crossings.settle()  # before anything reads what may not have come
            report = self._success(run)
        except BaseException as failed:
            error, report = failed, self._failure(failed)
        try:
            self._end(run, error, report)
        finally:
            del error  # whose traceback holds this frame
        if self._trains:
            self._replicas.meet()

    def call_off(self, error: BaseException) -> NoReturn:
        """This rank cannot begin what all have agreed on."""
        with self.together(None):
            raise error
        raise AssertionError("unreachable")

    def _success(self, run: Run | None) -> Report:
        """What the others need to know of a run in which nothing has failed here."""
        report: Report = {"drew": True} if self._rng.drew else {}
        if run is not None and self._opening.is_chosen:
            self._keep(run)
            report |= self.chooser.news()
        if self.ends and self.loss is not None:
            report["verdict"] = written(self.loss)
        return report

    def _end(self, run: Run | None, error: BaseException | None, report: Report) -> None:
        if error is not None:
            self._crossings.poison(self._failures.poison())
        reports = self._meet(report)
        failed = [k for k, each in enumerate(reports) if "failed" in each]
        if failed and error is None:
            self._crossings.poison(self._failures.poison())
        if any(each.get("drew") for each in reports):
            take_seed()
        if not failed:
            self._learn(run, reports)
        self._tidy(reports, drains=bool(failed))
        if failed:
            self._raise(error, reports)

    def _tidy(self, reports: Sequence[Report], *, drains: bool) -> None:
        """Leave nothing under way that the next run could take for its own."""
        lost = _unreached(reports)
        if lost:  # all could meet, but messages did not arrive, so that there is no next run
            self._lose(self._rendezvous.lost(lost))
            return
        with self._reaching():
            if drains:
                self._crossings.drain()
                self._crossings.settle()
            self._crossings.flush()
            self._announcements.flush()

    def _failure(self, error: BaseException) -> Report:
        """What the others need to know of a failure."""
        if isinstance(error, UnreachableError):
            return {"failed": True, "silent" if error.silent else "closed": [error.member]}
        report: Report = {"failed": True, "drew": self._rng.drew}
        if not isinstance(error, Cancelled):
            report["when"] = list(self._failures.earliest or BEFORE)
            report["what"] = text_of(error)
        return report

    def _learn(self, run: Run | None, reports: Sequence[Report]) -> None:
        """What others have found out: of their stages, of the losses, and what was recorded."""
        self.chooser.hear(reports)
        if run is not None and run.observer is not None:
            self._share_events(run.observer)
        if isinstance(self.loss, FarLoss):
            self.loss.verdict = verdict_of(reports[self._ranks[-1]]["verdict"])

    def _share_events(self, observer: RunObserver) -> None:
        now = time.perf_counter()  # all ranks come from a meeting, at nearly the same moment
        for k, each in enumerate(self._meet({"events": observer.told(now)})):
            if k != self._groups.me:
                observer.hear(each["events"], now)

    def _raise(self, error: BaseException | None, reports: Sequence[Report]) -> NoReturn:
        """Raise the failure that comes first in the schedule: this rank's own, or one that stands for another's."""
        self._expect_begun(error, reports)
        found = [(each["when"], k) for k, each in enumerate(reports) if "what" in each]
        if not found:
            assert self._lost is not None
            raise self._lost from None
        k = min(found)[1]
        if k == self._groups.me and error is not None:
            raise error
        raise RemoteError(f"rank {self._groups.members[k]} failed: {reports[k]['what']}") from None

    def _expect_begun(self, error: BaseException | None, reports: Sequence[Report]) -> None:
        """Raise what has kept any rank from beginning."""
        members, first = self._groups.members, self._groups.members[self._ranks[0]]
        if error is not None and "error" in reports[self._groups.me]:
            raise error
        for k, each in enumerate(reports):
            if "error" in each:
                raise RemoteError(f"rank {members[k]} could not begin: {each['error']}") from None
        for k, each in enumerate(reports):
            if "alike" in each:
                expect_alike(self._opening.first, each["alike"], (first, members[k]))


def _unreached(reports: Sequence[Report]) -> list[int]:
    """Who did not answer in time, but for those who waited in vain themselves; else with whom connections ended."""
    silent = {k for each in reports for k in each.get("silent", ())}
    waited = {k for k, each in enumerate(reports) if "silent" in each}
    return sorted(silent - waited or silent or {k for each in reports for k in each.get("closed", ())})


@lru_cache(maxsize=64)
def _program(name: str, size: Size, line: int, split: tuple[int, ...]) -> tuple[Step, ...]:
    """The steps of one rank, made without those of others where that is possible."""
    microbatches, stops, placement = size
    splits = split if name in SPLITTING else None
    return program_of(
        name, microbatches, len(placement), line, placement=placement, checkpoint_stop=stops, split=splits
    )


def _forwards(size: Size) -> Walk:
    return forwards_and_backwards(*size)[0]
