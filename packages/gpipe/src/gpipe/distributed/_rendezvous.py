"""A meeting of all ranks: each sends a report, and receives those of all others. And announcements of one to all."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ._errors import LostRankError, UnreachableError, is_of_gloo, named
from ._groups import ALONE, Group, Groups, expect_group, open_groups
from ._messages import RemoteLink

Report = dict[str, Any]
"""A dict that can be pickled."""

_GRACE = timedelta(seconds=5)
_MOMENT, _SILENCE, _PAUSE = 2.0, 30.0, 0.05  # seconds
_FAILED = (
    "a step has failed on this rank, for which others may wait; start the processes again, from the last checkpoint"
)


class Rendezvous:
    """Each member sends its report to the root, which sends the reports of all to each.

    A member that cannot reach another one closes its connections. So all others that wait come to the store, where each
    says that it is there: whoever was suspected and does not come is lost.
    """

    def __init__(self, groups: Groups, root: int = 0) -> None:
        self.groups = groups
        self.is_root = groups.me == root
        others = [k for k in range(len(groups.members)) if k != root] if self.is_root else [root]
        tag = next(groups.tags)
        # The root may still be waiting for another member, if there are any, when this one waits for its answer.
        timeout = (1 if self.is_root or len(groups.members) == 2 else 2) * (groups.timeout + _GRACE)
        self._links = [RemoteLink(groups.peer(k, tag, tag, timeout), small=0) for k in others]
        self._lost: str | None = None  # why no meeting begins any more

    def announced(self, what: Any) -> Any:
        """What the root says to all, none of which waits for any other; ``what`` at the root itself."""
        if not self.is_root:
            return self._links[0].hear()
        text = pickle.dumps(what)
        for link in self._links:
            link.tell(text)
        return what

    def meet(self, report: Report) -> list[Report]:
        """Send ``report``, and return those of all members; LostRankError, for good, if one is missing."""
        with self.reaching():
            return self._gather(report) if self.is_root else self._exchange(report)

    def expect_open(self) -> None:
        if self._lost is not None:
            raise LostRankError(self._lost)

    @contextmanager
    def reaching(self) -> Iterator[None]:
        """A context for what members do together. After a failure, no meeting begins any more: some members may be
        done, and others may wait.
        """
        self.expect_open()
        try:
            yield
        except LostRankError:
            raise
        except BaseException as error:
            if isinstance(error, UnreachableError) or is_of_gloo(str(error)):
                self._lost = self._found_lost(error)
                raise LostRankError(self._lost) from None
            self.leave()
            raise

    def leave(self, why: str = _FAILED) -> None:
        """Close all connections; others find this member missing."""
        self._lost = self._lost or why
        self.groups.end()

    def _found_lost(self, error: BaseException) -> str:
        """What all members raise, each of which comes here, because of ``error``."""
        suspects = {k for k in self.groups.peers if self.groups.is_closed(k)}
        patience = _MOMENT
        if isinstance(error, UnreachableError):
            suspects.add(error.member)
            # That one may itself wait for the one that is lost, and come a moment later.
            patience = min(self.groups.timeout.total_seconds(), _SILENCE) if error.silent else _MOMENT
        self.groups.end()  # so that whoever waits for this member comes here too
        try:
            return self._called_roll(suspects, patience)
        except RuntimeError:  # the process with the store has ended
            return self._text(suspects)

    def _called_roll(self, suspects: set[int], patience: float) -> str:
        """Say over the store that this member is there; wait for the suspects. The first to know says who is lost."""
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
        who = named([self.groups.members[k] for k in sorted(members)])
        return (
            f"{who} ended, or did not answer within {self.groups.timeout.total_seconds():g} s; start the processes "
            "again, from the last checkpoint; if it was only slow, with a timeout longer than a whole step, and what "
            "comes between two, may take"
        )

    def _gather(self, report: Report) -> list[Report]:
        reports = [link.hear() for link in self._links]
        reports.insert(self.groups.me, report)
        text = _text_of(reports, report)
        for link in self._links:
            with suppress(UnreachableError):  # a member that has ended since it reported is missing in the next meeting
                link.tell(text)
                link.flush()
        return reports

    def _exchange(self, report: Report) -> list[Report]:
        (link,) = self._links
        link.tell(pickle.dumps(report))
        reports: Any = link.hear()
        link.flush()
        return [reports.get(k, {}) for k in range(len(self.groups.members))]


def _text_of(reports: Sequence[Report], own: Report) -> bytes:
    """What the root tells all: the reports that say anything, by member.

    What is equal to the root's own is written once: else n reports with a list of n stages, sent n times, would be n**3
    numbers.
    """
    told = {
        k: {key: own[key] if key in own and own[key] == value else value for key, value in report.items()}
        for k, report in enumerate(reports)
        if report
    }
    return pickle.dumps(told)


_opened: WeakKeyDictionary[dist.ProcessGroup, Rendezvous] = WeakKeyDictionary()


def gathering_of(group: Group | None) -> Rendezvous:
    """The members of ``group``, all of which must call this together; by default all processes, or this one alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return Rendezvous(ALONE)
    group = expect_group(group)
    if group not in _opened:
        _opened[group] = Rendezvous(open_groups(group, None))
    return _opened[group]
