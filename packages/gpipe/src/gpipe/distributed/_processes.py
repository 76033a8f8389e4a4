"""Coordinate the ranks of a pipe: agree before a run, exchange messages during it, report at its end."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, NoReturn

from torch import Tensor, nn

from ..checkpoint._random import next_seed, take_seed
from ..engine._failures import When
from ..engine._processes import Processes, RunState
from ..model._generators import advance
from ..transport._transport import Channel
from ..values._describe import Cancelled
from ._agreement import disagreement
from ._deferred_signals import allow_signals, hold_signals
from ._device_links import ChannelEnds, open_device_links, tags
from ._digests import Digest, Digests, different_rows
from ._errors import RemoteError, UnreachableError, format_error
from ._forms import Payload
from ._groups import Groups
from ._local_stages import LocalStages
from ._messages import RemoteLink
from ._object_exchange import ObjectExchange, Report
from ._remote_loss import RemoteLoss, summarize_losses
from ._replicas import Replicas
from ._tied import TiedTensors, expect_equal_copies

_BEFORE: Final[When] = (-2.0, -1)
"""The time assigned to a failure before the first step of a run."""

_UNLIKE: Final[When] = (-1.0, -1)
"""The time assigned to a difference between the arguments of ranks. Failures before the first step are earlier."""

Errors = list[BaseException]
"""The failure of this rank, if any. It is removed from the list before an error is raised, because the frames of that
error refer to the list: otherwise a reference cycle would keep the frames, and the tensors of layers, in memory.
"""


class Rows(NamedTuple):
    """A micro-batch whose values are on another rank: only the number of rows of each tensor."""

    rows: tuple[int, ...]


class RunProposal:
    """The facts about a run that ranks agree on before it starts.

    Attributes:
        alike: values that must be equal on all ranks, keyed by the names used in error messages.
        batches: the micro-batches; on ranks without the first stage, their numbers of rows.
        rows: the digests of the mini-batch that this rank was given.
        whole: whether the loss is computed once, on the outputs of all micro-batches.
        seed: the seed of the run's random numbers; None until it is announced.
    """

    def __init__(self) -> None:
        self.seed: int | None = None
        self.must_match: dict[str, Any] = {}
        self.batches: list[Any] = []
        self.rows = Digests({})
        self.whole = False


class RankProcesses(Processes):
    """One rank's view of the ranks of a pipe. Each rank runs its own actions of a common schedule.

    Args:
        share: the part of the model that this rank has.
        routes: pairs of stages, other than neighbors, that exchange tensors.
        groups: the ranks, and the connections between them.
        ranks: the rank of each stage.
        replicas: the processes that synchronize with this one at the end of each step.
        reports: the result of :meth:`LocalStages.report` on each rank, by rank.

    Attributes:
        ranks: the rank of each stage.
        me: this rank.
        tied: the tensors that ranks share.
    """

    ranks: tuple[int, ...]
    me: int

    def __init__(
        self,
        share: LocalStages,
        routes: Sequence[tuple[int, int]],
        groups: Groups,
        ranks: Sequence[int],
        replicas: Replicas,
        reports: Sequence[Mapping[str, Any]],
    ) -> None:
        self.ranks, self.me = tuple(ranks), groups.me
        self._members, self._replicas = groups.members, replicas
        self._exchange = ObjectExchange(groups, ranks[0])
        backends = [reports[rank]["backends"][j] for j, rank in enumerate(ranks)]
        channels, devices = channels_between(ranks, routes, share.ties), share.device_of
        self._device_links = open_device_links(self._exchange, ranks, channels, devices, backends)
        # A shutdown would require all ranks to take part. Ending the device_links loses no transfers between runs.
        self._end_device_links = weakref.finalize(self, self._device_links.end)
        self._microbatches = 0
        self._rows, self._first_rows = Digests({}), dict[str, Digest]()  # of this rank, and of that of the first stage
        self._links: dict[int, RemoteLink] = {}  # by channel
        by_rank: dict[int, RemoteLink] = {}
        for number, a, b in channels:
            if self.me in (ranks[a], ranks[b]):  # never both, see channels_between
                (out, into), (here, there) = tags(number), (a, b)
                # As many as 1F1B has in flight. Without backwards, stage j computes micro-batch t - j in tick t. A
                # sender waits only for messages that are received in earlier ticks, so ranks cannot deadlock.
                most: int | None = max(b - a + 1, len(ranks) - a)
                if ranks[b] == self.me:
                    out, into, here, there, most = into, out, b, a, None
                peer = groups.peer(ranks[there], out, into)
                found = self._device_links.found
                link = RemoteLink(peer, devices[here], found.get(out), found.get(into), most=most)
                if number >= len(ranks) + len(routes):
                    by_rank[link.member] = link
                else:
                    self._links[number] = link
        self.tied = TiedTensors(share.tied, groups.me, by_rank, self._device_links)
        self._closed = False
        with self._reaching():
            self.tied.spread_values()

    def interruptible(self) -> allow_signals:
        return allow_signals()

    def channel(self, number: int, run: RunState) -> Channel | None:
        link = self._links.get(number)
        return None if link is None else RemoteChannel(link, run)

    def find_shared(self, module: nn.Module) -> list[Tensor]:
        return self.tied.find_trained(module)

    def sum_gradients(self, gradients: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        with self._reaching():
            self.tied.add_up(gradients)
        return gradients

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Exchange messages outside a run. After a failure, the connections are closed and no further run can start."""
        try:
            with self._exchange.reaching():
                yield
        except BaseException:
            self.leave()
            raise

    @contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Send or receive messages of a call. After an interrupt, no other call can start.

        Signals are deferred, so this is a second signal, or an error that another thread has raised in this one.
        """
        try:
            yield
        except UnreachableError:
            raise
        except BaseException as error:
            self._exchange.leave_interrupted(error)
            self.leave()
            raise

    def leave(self) -> None:
        """Close all connections to other ranks after a failure, so that no further run can start."""
        if not self._closed:
            self._exchange.leave()
            self._device_links.end()

    def close(self) -> None:
        """Close the connections to other ranks, by dropping all references to them."""
        if not self._closed:
            self._closed = True
            self._replicas.close()
            self._end_device_links()
            del self._exchange, self._links, self.tied, self._device_links

    @property
    def is_open(self) -> bool:
        """Whether this rank can exchange messages with the others."""
        return not self._closed and self._exchange.is_open

    def _expect_all(self) -> None:
        if self._closed:
            raise RuntimeError("this Rank was closed, with its connections to other ranks; create a new one")
        self._exchange.expect_open()

    def end_call(self, report: Report) -> list[Report]:
        """End a call that began with :meth:`begin_call` and is not a run: return all ranks' reports, or raise an error.

        The error is the earliest one of any rank.
        """
        self._expect(backwards=False)
        return self._end(None, [], report)

    def spread(self, what: Any, members: set[int]) -> Any:
        """Send ``what`` from the rank of the first stage to these ``members``, which call this together; return it."""
        with self._reaching():
            return self._exchange.spread(what, members)

    def _meet(self, report: Report, *lost: UnreachableError) -> list[Report]:
        """Exchange reports with all ranks. Raise LostRankError instead if a rank cannot be reached, as in ``lost``."""
        self._expect_all()
        with self._reaching():
            for error in lost:
                raise error
            return self._exchange.all_gather(report)

    @contextmanager
    def begin_call(self) -> Iterator[RunProposal]:
        """Run the checks of this rank before a run, or before another call of all ranks.

        No rank waits for all others: the rank of the first stage continues at once, and each other rank once it has
        received the announcement of the run. A rank with an error, or with different arguments than the rank of the
        first stage, cancels the run. The others are notified while they wait for a message, or at the end.
        """
        self._expect_all()
        found = RunProposal()
        errors: Errors = []
        report: Report = {}
        announced = None
        try:
            yield found
        except BaseException as failed:
            errors = [failed]
        rows = [Rows(tuple(batch.rows)) for batch in found.batches]
        try:
            own = found.must_match, rows, found.whole, found.rows.known
            with self._uninterrupted():
                announced = self._exchange.broadcast(None if errors else (*own, next_seed()))
        except UnreachableError as lost:
            errors = [lost]
        if announced is not None:
            expected, batches, found.whole, self._first_rows, found.seed = announced
            found.batches = found.batches if self._exchange.is_root else batches
            self._rows, (root, me) = found.rows, (self._members[self.ranks[0]], self._members[self.me])
            unlike = disagreement(expected, found.must_match, root, me) or different_rows(
                [(root, self._first_rows), (me, found.rows.known)]
            )
            if unlike is not None and not errors:
                errors, report = [Cancelled()], {"failed": True, "when": _UNLIKE, "unlike": str(unlike)}
        elif not errors:
            errors = [Cancelled()]
        self._microbatches = len(found.batches)
        if errors:
            self.call_off(errors, report)

    def call_off(self, errors: Errors, report: Report | None = None) -> NoReturn:
        """Cancel, on all ranks, a run that has not started, and raise its earliest error."""
        self._expect(backwards=False)
        self._end(None, errors, report or _failure(None, errors[0]))
        raise AssertionError("unreachable")

    @contextmanager
    def together(self, run: RunState) -> Iterator[None]:
        """Run a block as a full run: all ranks synchronize at its end, and raise the earliest failure of any rank."""
        errors: Errors = []
        self._expect(backwards=run.trains)
        try:
            yield
            self._device_links.settle()  # nothing may read values that have not arrived
            self._device_links.check()
            report = _success(run)
            if late := self._rows.late(self._first_rows):
                report["rows"] = late
            if copies := self.tied.states():
                report["copies"] = copies
        except BaseException as failed:
            errors, report = [failed], _failure(run, failed)
        self._end(run, errors, report)
        if run.trains:
            self._replicas.meet()

    def _expect(self, *, backwards: bool) -> None:
        for link in self._links.values():
            link.expect(self._microbatches, back=backwards)

    def _end(self, run: RunState | None, errors: Errors, report: Report) -> list[Report]:
        """Synchronize all ranks at the end of a run, and raise the earliest failure of any rank."""
        lost = [error for error in errors if isinstance(error, UnreachableError)]
        if errors and not lost:
            self._poison(run)
            for link in self._links.values():  # receive all messages, so that no sender waits for this rank
                with suppress(UnreachableError), self._uninterrupted():  # the synchronization below finds lost ranks
                    link.drain(expected=True)
        reports = self._meet(report, *lost)
        has_failed = any("failed" in each for each in reports)
        if any(each.get("drew") for each in reports):
            take_seed()
        own = set[str]() if run is None else run.rng.advanced
        for name in sorted(own.union(*(each.get("advanced", ()) for each in reports)) - own):
            advance(name)
        if has_failed and not errors:
            self._poison(run)
        elif run is not None and not has_failed:
            self._learn(run, reports)
        with self._reaching():  # the next run must not receive messages of this one
            for link in self._links.values() if has_failed else ():
                link.drain()
            if has_failed:
                self._device_links.settle()
            for link in self._links.values():
                link.flush()
        if has_failed:
            self._raise_earliest(reports, errors)
        expect_equal_copies([each.get("copies", {}) for each in reports], self._members)
        late = [(rank, each.get("rows", {})) for rank, each in zip(self._members, reports, strict=True)]
        if unlike := different_rows([(self._members[self.ranks[0]], self._first_rows), *late]):
            raise unlike
        return reports

    def _poison(self, run: RunState | None) -> None:
        for link in self._links.values():
            with suppress(UnreachableError), self._uninterrupted():  # the remaining links must still be notified
                link.poison(_earliest(run))

    def _learn(self, run: RunState, reports: Sequence[Report]) -> None:
        if isinstance(run.loss, RemoteLoss):
            run.loss.verdict = reports[self.ranks[-1]]["verdict"]
        if run.observer is not None:
            now = time.perf_counter()  # all ranks leave a synchronization at nearly the same time
            for k, each in enumerate(self._meet({"events": run.observer.export_events(now)})):
                if k != self.me:
                    run.observer.import_events(each["events"], now)

    def _raise_earliest(self, reports: Sequence[Report], errors: Errors) -> NoReturn:
        when, k = min((each["when"], k) for k, each in enumerate(reports) if "when" in each)
        own = reports[self.me]
        if "what" in own and own["when"] == when:
            raise errors.pop()
        errors.clear()
        if "unlike" in reports[k]:
            raise ValueError(reports[k]["unlike"]) from None
        raise RemoteError(f"rank {self._members[k]} failed: {reports[k]['what']}") from None


def channels_between(
    ranks: Sequence[int], routes: Sequence[tuple[int, int]], ties: Sequence[tuple[int, int]]
) -> list[ChannelEnds]:
    """Return the channels between different ranks, for neighbors, skips and shared tensors, equal on all ranks.

    Args:
        ranks: the rank of each stage.
        routes: pairs of stages connected by skips.
        ties: pairs of stages that share tensors.
    """
    ends = [*[(j - 1, j) for j in range(1, len(ranks))], *routes, *ties]
    return [(number, a, b) for number, (a, b) in enumerate(ends, start=1) if ranks[a] != ranks[b]]


class RemoteChannel(Channel):
    """A channel to a stage on another rank, for one run: values in one direction, gradients in the other.

    Args:
        link: the messages to and from the other rank.
        run: the run, which records a failure when the other rank cancels it. Each message has a flag: True if the
            sender knows that the losses of the run return counts.
    """

    __slots__ = ()

    def __init__(self, link: RemoteLink, run: RunState) -> None:
        arrived: dict[int, Payload] = {}
        loss, failures, observer = run.loss, run.failures, run.observer

        def put(microbatch: int, payload: Any) -> None:
            with hold_signals():
                link.put(microbatch, payload, flag=loss is not None and loss.scales)

        def get(microbatch: int) -> Any:
            while microbatch not in arrived:
                try:
                    with hold_signals():
                        i, counts, arrived[i] = link.get()
                except Cancelled:
                    failures.add_remote(link.poisoned)
                    raise
                if isinstance(loss, RemoteLoss):
                    loss.scales |= counts
            payload = arrived.pop(microbatch)
            if observer is not None:
                observer.got(payload, moved=True)
            return payload

        self.get_values = self.get_gradients = get
        self.put_values = self.put_gradients = put

    def cancel(self) -> None:
        """Do nothing: other ranks are notified of a failure by :meth:`RemoteLink.poison`."""


def _earliest(run: RunState | None) -> When:
    return _BEFORE if run is None else run.failures.earliest or _BEFORE


def _drawn(run: RunState) -> Report:
    """Return which random number generators a run has advanced; an empty report if it has advanced none."""
    found = {"drew": run.rng.drew, "advanced": [*run.rng.advanced]}
    return {name: value for name, value in found.items() if value}


def _success(run: RunState) -> Report:
    report = _drawn(run)
    if run.loss is not None and not isinstance(run.loss, RemoteLoss):
        report["verdict"] = summarize_losses(run.loss)
    return report


def _failure(run: RunState | None, error: BaseException) -> Report:
    report: Report = {"failed": True, **({} if run is None else _drawn(run))}
    if not isinstance(error, Cancelled):
        report |= {"when": _earliest(run), "what": format_error(error)}
    return report
