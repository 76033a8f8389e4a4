"""Exchange objects between all ranks (all-gather, and broadcast from a root), and identify lost ranks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ._errors import LostRankError, UnreachableError, format_error, is_of_gloo, name_ranks
from ._groups import ALONE, Group, Groups, expect_group, open_groups
from ._messages import RemoteLink

Report = dict[str, Any]
"""A picklable dict."""

_GRACE = timedelta(seconds=5)
_MOMENT, _SILENCE, _PAUSE = 2.0, 30.0, 0.05  # seconds
_RESTART = "restart all processes from the last checkpoint"


class ObjectExchange:
    """Each member sends its report to the root, which sends all reports to each member.

    A member that cannot reach another one closes its connections. This wakes all members that wait for it, and each
    registers as present in the store. A suspected member that does not register is lost.
    """

    def __init__(self, groups: Groups, root: int = 0) -> None:
        self.groups = groups
        self.is_root = groups.me == root
        others = [k for k in range(len(groups.members)) if k != root] if self.is_root else [root]
        tag = next(groups.tags)
        # While this member waits for the root's answer, the root may still be waiting for a third member.
        timeout = (1 if self.is_root or len(groups.members) == 2 else 2) * (groups.timeout + _GRACE)
        self._links = [RemoteLink(groups.peer(k, tag, tag, timeout), small=0) for k in others]
        self._lost: str | None = None  # why no further exchange can start

    def broadcast(self, what: Any) -> Any:
        """Broadcast ``what`` from the root, and return it. Members wait for the root only, and the root for none."""
        return self.spread(what, {link.member for link in self._links} if self.is_root else set())

    def spread(self, what: Any, members: set[int]) -> Any:
        """Send ``what`` from the root to these ``members``, and return it. Only they and the root call this."""
        if not self.is_root:
            return self._links[0].receive()
        text = pickle.dumps(what)
        for link in self._links:
            if link.member in members:
                link.tell(text)
        return what

    def all_gather(self, report: Report) -> list[Report]:
        """All-gather reports. If a member is missing, this call and all later ones raise LostRankError."""
        with self.reaching():
            return self._gather(report) if self.is_root else self._exchange(report)

    @property
    def is_open(self) -> bool:
        return self._lost is None

    def expect_open(self) -> None:
        if self._lost is not None:
            raise LostRankError(self._lost)

    @contextmanager
    def reaching(self) -> Iterator[None]:
        """Run a block that all members run together.

        After a failure, no further exchange can start, because some members may have finished while others wait.
        """
        self.expect_open()
        try:
            yield
        except LostRankError:
            raise
        except BaseException as error:
            if isinstance(error, UnreachableError) or is_of_gloo(str(error)):
                self._lost = self._find_lost(error)
                raise LostRankError(self._lost) from None
            self.leave_interrupted(error)
            raise

    def leave_interrupted(self, error: BaseException) -> None:
        """Leave because ``error`` was raised in the middle of an exchange, so that its outcome is unknown."""
        self.leave(
            f"rank {self.groups.members[self.groups.me]} failed while it exchanged messages with other "
            f"ranks, which may have finished the call or not: {format_error(error)}; {_RESTART}"
        )

    def leave(self, why: str | None = None) -> None:
        """Close all connections. The other members then raise LostRankError with the message ``why``, as this one."""
        if self._lost is None:
            me = self.groups.members[self.groups.me]
            self._lost = why or f"a step has failed on rank {me} while other ranks may wait for it; {_RESTART}"
            if self.groups.store is not None:
                with suppress(RuntimeError):  # the process with the store has exited
                    self.groups.store.compare_set("lost", "", self._lost)
        self.groups.end()

    def _find_lost(self, error: BaseException) -> str:
        """Return the message that all members raise after ``error``. Each member calls this."""
        suspects = {k for k in self.groups.peers if self.groups.is_closed(k)}
        patience = _MOMENT
        if isinstance(error, UnreachableError):
            suspects.add(error.member)
            # That member may itself be waiting for the lost one, and get here a moment later.
            patience = min(self.groups.timeout.total_seconds(), _SILENCE) if error.silent else _MOMENT
        self.groups.end()  # wakes the members that wait for this one, so that they get here too
        try:
            return self._call_roll(suspects, patience)
        except RuntimeError:  # the process with the store has exited
            return self._text(suspects)

    def _call_roll(self, suspects: set[int], patience: float) -> str:
        """Register this member in the store, and wait for the suspects to register.

        The first member that identifies the lost ones stores the message, which all members return.
        """
        store, end = self.groups.store, time.monotonic() + patience
        store.set(f"here/{self.groups.me}", ",".join(map(str, suspects)))
        while not store.check(["lost"]):
            present = {k for k in suspects if store.check([f"here/{k}"])}
            suspects |= {int(each) for k in present for each in store.get(f"here/{k}").split(b",") if each}
            if time.monotonic() > end:
                store.compare_set("lost", "", self._text(suspects - present or suspects))
            else:
                time.sleep(_PAUSE)
        return str(store.get("lost").decode())

    def _text(self, members: set[int]) -> str:
        who = name_ranks([self.groups.members[k] for k in sorted(members)])
        return (
            f"{who} ended, or did not answer within {self.groups.timeout.total_seconds():g} s; {_RESTART}, "
            "and if a rank was only slow, with a timeout that exceeds the time of a step and "
            "of the work between two steps"
        )

    def _gather(self, report: Report) -> list[Report]:
        reports = [link.receive() for link in self._links]
        reports.insert(self.groups.me, report)
        text = _pickle_reports(reports, report)
        for link in self._links:
            with suppress(UnreachableError):  # the next exchange detects a member that has exited since its report
                link.tell(text)
                link.flush()
        return reports

    def _exchange(self, report: Report) -> list[Report]:
        (link,) = self._links
        link.tell(pickle.dumps(report))
        reports: Any = link.receive()
        link.flush()
        return [reports.get(k, {}) for k in range(len(self.groups.members))]


def _pickle_reports(reports: Sequence[Report], own: Report) -> bytes:
    """Pickle the non-empty reports, by member, for the root to send to all.

    Values equal to the root's are stored once. Otherwise n reports with a list of n stages, sent n times, would be n**3
    numbers.
    """
    attributes = {
        k: {key: own[key] if key in own and own[key] == value else value for key, value in report.items()}
        for k, report in enumerate(reports)
        if report
    }
    return pickle.dumps(attributes)


_opened: WeakKeyDictionary[dist.ProcessGroup, ObjectExchange] = WeakKeyDictionary()


def get_exchange(group: Group | None) -> ObjectExchange:
    """Return the exchange of ``group``, whose members call this together. It is created in the first call.

    By default, the members are all processes, or only this one if there is no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return ObjectExchange(ALONE)
    group = expect_group(group)
    if group not in _opened:
        _opened[group] = ObjectExchange(open_groups(group, None))
    return _opened[group]
