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
from ..engine._pipeline import Pipeline
from ..engine._run import Run
from ..engine._stage import Stage
from ..engine._walks import Size, forwards_and_backwards, walk_of
from ..engine._workers import Workers
from ..schedule import SPLITTING, Choice, Kind, Schedule, Step, Walk, program_of
from ..skip import SkipLayout
from ..transport._channels import Connect, Nearby
from ..transport._copy import CopyStreams
from ..values._describe import Cancelled
from ..values._leaves import Activation
from ._channels import Crossings, Reach
from ._errors import LostRankError, RemoteError, UnreachableError
from ._failures import BEFORE, RankFailures
from ._far_loss import FarLoss
from ._groups import Groups
from ._random import AgreedRNG, take_seed
from ._rendezvous import Rendezvous, Word
from ._tied import Twin, Twins
from ._verdict import verdict_of, written


class RankPipeline(Pipeline):
    """The stages of one rank. Every rank walks its steps of the same walk, on the caller's thread.

    Args:
        stages: those of this rank.
        layout, copy_streams, workers: as for any pipeline.
        groups: the ranks, and over what they talk.
        ranks: that of each stage, of all ranks.
        rendezvous: where the ranks meet.
        twins: tensors that other ranks have too.

    Attributes:
        loss: of the run that is under way.
        begins, ends: whether the first and the last stage are here.
    """

    threads = None

    def __init__(
        self,
        stages: Sequence[Stage],
        layout: SkipLayout,
        copy_streams: Sequence[CopyStreams],
        workers: Workers,
        groups: Groups,
        ranks: Sequence[int],
        rendezvous: Rendezvous,
        twins: Sequence[Twin],
    ) -> None:
        super().__init__(stages, layout, copy_streams, workers)
        self.count = len(ranks)
        self.line = groups.me
        self.begins = ranks[0] == groups.me
        self.ends = ranks[-1] == groups.me
        self._ranks = tuple(ranks)
        self._groups = groups
        self._rendezvous = rendezvous
        devices = dict(zip([stage.index for stage in stages], self.devices, strict=True))
        self._crossings = Crossings(groups, ranks, layout, devices)
        self._twins = Twins(twins, groups, 2 * (len(ranks) + len(layout.routes)))
        self._lost: LostRankError | None = None
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
            self._lost = self._rendezvous.lost([error.member])
            raise self._lost from None

    def meet(self, word: Word) -> list[Word]:
        """Say something to all ranks, and hear what each has said."""
        if self._lost is not None:
            raise LostRankError(str(self._lost))
        try:
            return self._rendezvous.meet(word)
        except LostRankError as error:
            self._lost = error
            raise

    def begin(self, microbatches: int, seed: int, loss: Losses | None, *, backwards: bool) -> None:
        """All ranks have agreed on a run."""
        self._since = time.perf_counter()  # all ranks come here at nearly the same moment
        self._rng = AgreedRNG(seed)
        self._failures = RankFailures()
        self.loss = loss
        self._crossings.expect(microbatches, backwards=backwards)

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
        word: Word = {}
        try:
            yield
            word = self._word(run)
        except BaseException as failed:
            error = failed
        try:
            self._end(run, error, word)
        finally:
            del error  # whose traceback holds this frame

    def call_off(self, error: BaseException) -> NoReturn:
        """This rank cannot begin what all have agreed on."""
        with self.together(None):
            raise error
        raise AssertionError("unreachable")

    def _word(self, run: Run | None) -> Word:
        """What the others need to know of a run in which nothing has failed here."""
        word: Word = {"drew": self._rng.drew}
        if run is not None and run.observer is not None:
            word["events"] = run.observer.told(self._since)
        if self.ends and self.loss is not None:
            word["verdict"] = written(self.loss)
        return word

    def _end(self, run: Run | None, error: BaseException | None, word: Word) -> None:
        if error is not None:
            word = self._complaint(error)
            self._crossings.poison(self._failures.poison())
        said = self.meet(word)
        failed = [k for k, each in enumerate(said) if "failed" in each]
        if failed and error is None:
            self._crossings.poison(self._failures.poison())
        if any(each.get("drew") for each in said):
            take_seed()
        if not failed:
            self._learn(run, said)
            self._crossings.flush()
            return
        self._crossings.drain()
        self._crossings.flush()
        self._raise(error, said)

    def _complaint(self, error: BaseException) -> Word:
        """What the others need to know of a failure."""
        if isinstance(error, UnreachableError):
            return {"failed": True, "silent" if error.silent else "closed": [error.member]}
        word: Word = {"failed": True, "drew": self._rng.drew}
        if not isinstance(error, Cancelled):
            notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
            word["when"] = list(self._failures.earliest or BEFORE)
            word["what"] = f"{type(error).__name__}: {error}{notes}"
        return word

    def _learn(self, run: Run | None, said: Sequence[Word]) -> None:
        """What others have found out: the losses, on the rank of the last stage, and what was recorded."""
        if run is not None and run.observer is not None:
            for k, each in enumerate(said):
                if k != self._groups.me:
                    run.observer.hear(each.get("events", []), self._since)
        if isinstance(self.loss, FarLoss):
            self.loss.verdict = verdict_of(said[self._ranks[-1]]["verdict"])

    def _raise(self, error: BaseException | None, said: Sequence[Word]) -> NoReturn:
        """Raise the failure that comes first in the schedule: this rank's own, or one that stands for another's."""
        found = [(each["when"], k) for k, each in enumerate(said) if "what" in each]
        if not found:
            closed = sorted({k for each in said for k in (*each.get("closed", ()), *each.get("silent", ()))})
            self._lost = self._rendezvous.lost(closed)
            raise self._lost from None
        k = min(found)[1]
        if k == self._groups.me and error is not None:
            raise error
        raise RemoteError(f"rank {self._groups.members[k]} failed: {said[k]['what']}") from None


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
