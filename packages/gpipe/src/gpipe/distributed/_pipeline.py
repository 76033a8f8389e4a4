"""The stages of a rank, as a pipeline that the engine runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from microbatch import Batch
from streams import AbstractStream

from ..engine._losses import Losses
from ..engine._pipeline import Pipeline
from ..engine._run import Run
from ..engine._settings import RunObserver
from ..engine._stage import Stage
from ..engine._walks import Size, forwards_and_backwards, walk_of
from ..engine._workers import Workers
from ..module._choices import Choices, laid_out
from ..schedule import SPLITTING, Choice, Kind, Schedule, Step, Walk, program_of
from ..transport._copy import CopyStreams
from ..transport._link import Link
from ..values._describe import Cancelled
from ..values._leaves import Activation
from ._agreement import expect_begun
from ._channels import Crossings, RankTransport, crossings_of
from ._choosing import RankChooser
from ._errors import LostRankError, RemoteError, UnreachableError, text_of
from ._failures import BEFORE, RankFailures
from ._far_loss import FarLoss, verdict_of
from ._groups import Groups
from ._messages import Peer, RemoteLink, Ways
from ._opening import Opening
from ._own import Share
from ._places import channels_between, ties_between
from ._random import AgreedRNG, take_seed
from ._rendezvous import Rendezvous, Report
from ._replicas import Replicas
from ._tied import Twins
from ._wires import open_wires

_CPU = torch.device("cpu")
_ANNOUNCED = 0
"""The tag of announcements; those of channels begin at 2."""


class RankPipeline(Pipeline):
    """The stages of one rank. Each rank takes its own steps of a common schedule, in the caller's thread.

    Args:
        share: the part of the model that this rank has.
        choices: what is checkpointed; that decides which stages have blocks.
        workers: as for any pipeline.
        groups: the ranks, and the connections between them.
        ranks: the rank of each stage.
        rendezvous: exchanges reports between the ranks.
        replicas: the processes that end each step together with this one.
        told: by rank, what :meth:`Share.told` returned there.

    Attributes:
        loss: the losses of the current run.
        chooser: chooses schedules.
        begins, ends: whether the first and the last stage are in this process.

    Raises:
        RuntimeError: a connection between accelerators could not be opened; see :func:`open_wires`.
    """

    threads = None

    def __init__(
        self,
        share: Share,
        choices: Choices,
        workers: Workers,
        groups: Groups,
        ranks: Sequence[int],
        rendezvous: Rendezvous,
        replicas: Replicas,
        told: Sequence[Mapping[str, Any]],
    ) -> None:
        devices = dict(zip(share.numbers, share.devices, strict=True))
        every, layout = laid_out(share.every, [devices.get(j, _CPU) for j in range(len(ranks))], choices)
        streams = [CopyStreams.on(device) for device in share.devices]
        super().__init__([every[j] for j in share.numbers], layout, streams, workers)
        self.count = len(ranks)
        self.line = groups.me
        self.begins = ranks[0] == groups.me
        self.ends = ranks[-1] == groups.me
        self._ranks = tuple(ranks)
        self._groups = groups
        self._rendezvous = rendezvous
        self._replicas = replicas
        places = [told[rank]["places"][j] for j, rank in enumerate(ranks)]
        wires = open_wires(rendezvous, groups, ranks, layout, share.ties, devices, places, told[0]["name"])
        channels = crossings_of(groups, ranks, channels_between(ranks, layout), devices, wires)
        self._crossings = Crossings(channels, wires)
        hearers = [k for k in range(len(groups.members)) if k != ranks[0]] if self.begins else [ranks[0]]
        peers = [Peer(groups.values, k, _ANNOUNCED) for k in hearers]
        self._announcing = [RemoteLink(Ways(each, each)) for each in peers]
        if not self.begins:
            self._announcing[0].expect(1)
        self.chooser = RankChooser(self.stages, groups.me, [each["trained"] for each in told])
        self._opening = Opening()
        self._trains = False
        self._rng = AgreedRNG(0)
        tied = crossings_of(groups, ranks, ties_between(ranks, layout, share.ties), devices, wires)
        self._twins = Twins(share.twins, groups.me, {each.link.member: each.link for each in tied}, wires)
        self._closed = False
        with self._sharing():
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
        """The forwards; the second walk is empty, since backwards are for :meth:`train` alone."""
        self._failures.whole = partial(_forwards, size)
        program = _program("fill_drain", size, self.line, ())
        return self._alone(tuple(step for step in program if step.action.kind == Kind.FORWARD)), ()

    def _alone(self, program: tuple[Step, ...]) -> Walk:
        """A walk in which only this rank has steps."""
        return (*[()] * self.line, program)

    def random_numbers(self) -> AgreedRNG:
        return self._rng

    def failures(self) -> RankFailures:
        return self._failures

    def transport(self, streams: Sequence[AbstractStream], link: type[Link[Any]], failures: Any) -> RankTransport:
        places = self.places(streams)
        return RankTransport(self._crossings, failures, self.loss, places, self.count, self._layout, link)

    def entering(self, batches: Sequence[Batch]) -> list[Activation]:
        return super().entering(batches) if self.begins else []

    def tied_elsewhere(self, stage: Stage) -> list[Tensor]:
        return self._twins.trained(stage.module)

    def twins_elsewhere(self) -> set[Tensor]:
        """The tensors of this rank that count as another's, which has a stage with them before the stages here."""
        return self._twins.of_others()

    def whole(self, run: Run) -> tuple[list[Tensor], list[Tensor]]:
        with self._sharing():
            found = self._twins.summed(run.parts(), [stage.index for stage in self.stages])
        return list(found), list(found.values())

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        """A context for the exchange of shared tensors.

        Ranks do not meet at its end. If it fails, some may have received what they wait for, and others may wait for
        this rank, so that no run begins any more.
        """
        try:
            with self._reaching():
                yield
        except BaseException as error:
            if self._twins.are_there and not isinstance(error, LostRankError):
                failed = f"rank {dist.get_rank()} failed: {text_of(error)}"
                why = "weights that ranks share may differ now, so start the processes again, from the last checkpoint"
                self._leave(LostRankError(f"{failed}; {why}"))
            raise

    def _leave(self, why: LostRankError) -> None:
        """Begin no run any more, and let the others hear why, where they wait for this rank now or in the next run."""
        self._rendezvous.leave(why)
        self._crossings.end()

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """A context for messages outside of a run: if a rank is lost, the others hear of it where they wait for us."""
        try:
            yield
        except UnreachableError as error:
            lost = self._rendezvous.left() or self._rendezvous.lost([error.member])
            self._leave(lost)
            raise lost from None

    def close(self) -> None:
        """Close the connections to other ranks, by dropping all references to them. No run begins any more."""
        if not self._closed:
            self._closed = True
            self._replicas.close()
            del self._groups, self._rendezvous, self._crossings, self._announcing, self._twins

    def _expect_all(self) -> None:
        if self._closed:
            raise RuntimeError("this Rank was closed, and with it its connections to other ranks; make a new one")
        self._rendezvous.expect_open()

    def _meet(self, report: Report) -> list[Report]:
        """Send a report to all ranks, and return those of all."""
        self._expect_all()
        try:
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
            self._crossings.expect(len(self._opening.batches), backwards=False)
            try:
                self._end(None, error, report)
            finally:
                del error

    def _announce(self, *, failed: bool) -> None:
        """Announce a run, or a failure before it, from the rank of the first stage; :class:`Cancelled` if that has
        failed.
        """
        if not self.begins:
            (link,) = self._announcing
            told = link.hear()
            link.expect(1)
            if told is None:
                raise Cancelled
            self._opening.hear(told)
            return
        told, lost = None if failed else self._opening.told(), None
        for link in self._announcing:
            try:
                link.tell(told)
            except UnreachableError as error:
                lost = error  # all others still have to be told
        if lost is not None:
            raise lost

    def begin(self, loss: Losses | None, *, backwards: bool) -> None:
        """Begin the run that was announced."""
        self._rng = AgreedRNG(self._opening.seed)
        self.loss = loss
        self._trains = backwards
        self._crossings.expect(len(self._opening.batches), backwards=backwards)

    def outputs(self, batches: Sequence[Batch]) -> list[Activation]:
        """The outputs of all micro-batches on the rank of the last stage, computed without gradients."""
        with self.workers.section.entered(), torch.no_grad():
            run = Run(self, len(batches), (0,) * self.count)
            with self.together(run):
                entering = self.entering(batches)
                if self.ends:
                    return run.forward(entering)
                run.evaluate(entering)
                return []

    @contextmanager
    def together(self, run: Run | None) -> Iterator[None]:
        """A context for a whole run: all ranks meet at its end, and learn whether another one has failed."""
        error: BaseException | None = None
        report: Report = {}
        try:
            yield
            self._crossings.settle()  # before anything reads values that may not have arrived
            report = self._success(run)
        except BaseException as failed:
            error, report = failed, self._failure(failed)
        try:
            self._end(run, error, report)
        finally:
            del error  # its traceback refers to this frame
        if self._trains:
            self._replicas.meet()

    def call_off(self, error: BaseException) -> NoReturn:
        """Cancel a run that all ranks have agreed on, because this one cannot begin it."""
        with self.together(None):
            raise error
        raise AssertionError("unreachable")

    def _success(self, run: Run | None) -> Report:
        """The report of a run that has not failed on this rank."""
        report: Report = {"drew": True} if self._rng.drew else {}
        if run is not None and self._opening.is_chosen:
            report |= self.chooser.news()
        if self.ends and self.loss is not None:
            report["verdict"] = verdict_of(self.loss)
        return report

    def _end(self, run: Run | None, error: BaseException | None, report: Report) -> None:
        if error is not None:
            self._crossings.poison(self._failures.earliest or BEFORE)
            self._crossings.take()
        reports = self._meet(report)
        failed = [k for k, each in enumerate(reports) if "failed" in each]
        if failed and error is None:
            self._crossings.poison(self._failures.earliest or BEFORE)
        if any(each.get("drew") for each in reports):
            take_seed()
        if not failed:
            self._learn(run, reports)
        self._tidy(reports, drains=bool(failed))
        if failed:
            self._raise(error, reports)

    def _tidy(self, reports: Sequence[Report], *, drains: bool) -> None:
        """Make sure that no message of this run is left for the next one to read."""
        lost = _unreached(reports)
        if lost:  # all ranks have met, but messages did not arrive: there is no next run
            self._leave(self._rendezvous.lost(lost))
            return
        with self._reaching():
            if drains:
                self._crossings.drain()
                self._crossings.settle()
            self._crossings.flush()
            for link in self._announcing:
                link.flush()

    def _failure(self, error: BaseException) -> Report:
        """The report of a failure."""
        if isinstance(error, UnreachableError):
            return {"failed": True, "silent" if error.silent else "closed": [error.member]}
        report: Report = {"failed": True, "drew": self._rng.drew}
        if not isinstance(error, Cancelled):
            report["when"] = list(self._failures.earliest or BEFORE)
            report["what"] = text_of(error)
        return report

    def _learn(self, run: Run | None, reports: Sequence[Report]) -> None:
        """Take in what others have reported: about their stages, the losses, and the records of a timeline."""
        self.chooser.hear(reports)
        if run is not None and run.observer is not None:
            self._share_events(run.observer)
        if isinstance(self.loss, FarLoss):
            self.loss.verdict = reports[self._ranks[-1]]["verdict"]

    def _share_events(self, observer: RunObserver) -> None:
        now = time.perf_counter()  # all ranks leave a meeting at nearly the same moment
        for k, each in enumerate(self._meet({"events": observer.export_events(now)})):
            if k != self._groups.me:
                observer.import_events(each["events"], now)

    def _raise(self, error: BaseException | None, reports: Sequence[Report]) -> NoReturn:
        """Raise what kept a rank from beginning; else the failure that comes first in the schedule.

        It is this rank's own, or a RemoteError for another's.
        """
        if error is not None and "error" in reports[self._groups.me]:
            raise error
        expect_begun(reports, self._groups.members, self._ranks[0], self._opening.first)
        found = [(each["when"], k) for k, each in enumerate(reports) if "what" in each]
        if not found:
            self._rendezvous.expect_open()
        k = min(found)[1]
        if k == self._groups.me and error is not None:
            raise error
        raise RemoteError(f"rank {self._groups.members[k]} failed: {reports[k]['what']}") from None


def _unreached(reports: Sequence[Report]) -> list[int]:
    """Ranks that did not answer in time, without those that were waiting themselves; else those whose connections
    closed.
    """
    silent = {k for each in reports for k in each.get("silent", ())}
    waited = {k for k, each in enumerate(reports) if "silent" in each}
    return sorted(silent - waited or silent or {k for each in reports for k in each.get("closed", ())})


@lru_cache(maxsize=64)
def _program(name: str, size: Size, line: int, split: tuple[int, ...]) -> tuple[Step, ...]:
    """The steps of one rank, computed without those of others where that is possible."""
    microbatches, stops, placement = size
    splits = split if name in SPLITTING else None
    return program_of(
        name, microbatches, len(placement), line, placement=placement, checkpoint_stop=stops, split=splits
    )


def _forwards(size: Size) -> Walk:
    return forwards_and_backwards(*size)[0]
