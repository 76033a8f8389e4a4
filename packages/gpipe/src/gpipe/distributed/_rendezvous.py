"""Where all ranks meet: each sends a report to all others."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._errors import LostRankError, UnreachableError
from ._groups import Groups
from ._messages import SMALL, Peer

Report = dict[str, Any]
"""What JSON can write. ``report["silent"]`` lists members that did not answer in time."""

_UP, _DOWN = 0, 1
_HEAD = 8
_GRACE = timedelta(seconds=5)


class Rendezvous:
    """A star: all send to member 0, which sends all reports to all. So who is missing is known, as in no collective.

    Args:
        groups: who meets.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        others = range(1, len(groups.members)) if groups.me == 0 else (0,)
        self._out = {k: Peer(groups.control, k, _DOWN if groups.me == 0 else _UP) for k in others}
        self._in = {k: Peer(groups.control, k, _UP if groups.me == 0 else _DOWN) for k in others}
        self._count = 0

    def meet(self, report: Report) -> list[Report]:
        """Send ``report``; those of all, in the order of members.

        Raises:
            LostRankError: somebody is missing. So nobody can meet any more.
        """
        self._count += 1
        reports = self._gather(report) if self._groups.me == 0 else self._exchange(report)
        lost = [k for k, each in enumerate(reports) if each is None]
        if lost:
            raise self.lost(lost)
        return reports

    def lost(self, members: list[int]) -> LostRankError:
        """The error that says so."""
        ranks = ", ".join(str(self._groups.members[k]) for k in members)
        who = f"rank {ranks} has" if len(members) == 1 else f"ranks {ranks} have"
        return LostRankError(
            f"{who} ended, or did not answer within {self._groups.timeout.total_seconds():g} s; start the processes "
            "again, from the last checkpoint"
        )

    def _gather(self, report: Report) -> list[Any]:
        reports: list[Any] = [report, *[None] * len(self._in)]
        silent = {*report.get("silent", ())}
        # All at once: when a wait for one has taken too long, gloo ends the connections to all, but not what has come.
        coming = {k: _Coming(peer) for k, peer in self._in.items()}
        while coming:
            # A rank that waits in vain may wait for one that waits in vain itself, whose own report is about to come.
            k = min(coming, key=lambda k: (k in silent, k))
            timeout = min(_GRACE, self._groups.timeout) if k in silent else self._groups.timeout
            reports[k] = coming.pop(k).report(timeout)
            silent.update((reports[k] or {}).get("silent", ()))
        if None in reports:
            self._store_lost(reports)
        for peer in self._out.values():
            if reports[peer.member] is not None:
                with suppress(UnreachableError):
                    _wait(peer, _sent(peer, reports))
        return reports

    def _exchange(self, report: Report) -> list[Any]:
        coming = _Coming(self._in[0])
        with suppress(UnreachableError):
            under_way = _sent(self._out[0], report)
            # Not waited for by itself: member 0 may be waiting for somebody else yet, as long as that may take.
            reports = coming.report(2 * (self._groups.timeout + _GRACE))
            if reports is not None:
                _wait(self._out[0], under_way)
                return reports  # type: ignore[no-any-return]
        return self._stored_lost()

    def _store_lost(self, reports: list[Any]) -> None:
        """Put the numbers of who is missing into the store: gloo may have ended the other connections too."""
        store = _store()
        if store is not None:
            with suppress(RuntimeError):
                store.set(self._key, json.dumps([k for k, each in enumerate(reports) if each is None]))

    def _stored_lost(self) -> list[Any]:
        """Member 0 is out of reach: has it stored the numbers of others? Else it is the one that is missing."""
        store, lost = _store(), [0]
        if store is not None:
            with suppress(RuntimeError):
                store.wait([self._key], _GRACE)
                lost = json.loads(store.get(self._key))
        return [None if k in lost else {} for k in range(len(self._groups.members))]

    @property
    def _key(self) -> str:
        return f"gpipe/{self._groups.members}/{self._count}/lost"


Transfers = list[tuple[Any, torch.Tensor]]


def _sent(peer: Peer, what: Any) -> Transfers:
    """What is under way, with the memory that must stay till then."""
    text = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8)
    head = torch.tensor([len(text)]).view(torch.uint8)
    fits = _HEAD + len(text) <= SMALL
    return [(peer.send(part), part) for part in ([torch.cat([head, text])] if fits else [head, text])]


def _wait(peer: Peer, transfers: Transfers) -> None:
    for work, _ in transfers:
        peer.wait(work)


class _Coming:
    """A message for which there is memory, before it has come."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._frame = torch.empty(SMALL, dtype=torch.uint8)
        try:
            self._work: Any = peer.receive(self._frame)
        except UnreachableError:
            self._work = None

    def report(self, timeout: timedelta) -> Any:
        """Wait for it; None if it does not come."""
        try:
            return None if self._work is None else self._received(timeout)
        except UnreachableError:
            return None

    def _received(self, timeout: timedelta) -> Any:
        self._peer.wait(self._work, timeout)
        size = int(self._frame[:_HEAD].view(torch.int64))
        text = self._frame[_HEAD : _HEAD + size]
        if _HEAD + size > SMALL:
            text = torch.empty(size, dtype=torch.uint8)
            self._peer.wait(self._peer.receive(text), timeout)
        return json.loads(bytes(text.tolist()))


def _store() -> Any:
    """The store of the process group. Torch has no public way to it."""
    with suppress(AttributeError, ValueError, RuntimeError):
        return dist.distributed_c10d._get_default_store()
    return None
