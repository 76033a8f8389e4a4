"""Where all ranks meet: each says something, and hears what all have said."""

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

Word = dict[str, Any]
"""What JSON can write. ``word["silent"]`` lists members that did not answer in time."""

_UP, _DOWN = 0, 1
_HEAD = 8
_GRACE = timedelta(seconds=5)


class Rendezvous:
    """A star: all tell member 0, who tells all. So whoever is missing is known by name, as in no collective.

    Args:
        groups: who meets.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        others = range(1, len(groups.members)) if groups.me == 0 else (0,)
        self._out = {k: Peer(groups.control, k, _DOWN if groups.me == 0 else _UP) for k in others}
        self._in = {k: Peer(groups.control, k, _UP if groups.me == 0 else _DOWN) for k in others}
        self._count = 0

    def meet(self, word: Word) -> list[Word]:
        """Say ``word``; what each has said, in the order of members.

        Raises:
            LostRankError: somebody is missing. So nobody can meet any more.
        """
        self._count += 1
        said = self._gather(word) if self._groups.me == 0 else self._tell(word)
        lost = [k for k, each in enumerate(said) if each is None]
        if lost:
            raise self.lost(lost)
        return said

    def lost(self, members: list[int]) -> LostRankError:
        """The error that says so."""
        ranks = ", ".join(str(self._groups.members[k]) for k in members)
        who = f"rank {ranks} has" if len(members) == 1 else f"ranks {ranks} have"
        return LostRankError(
            f"{who} ended, or did not answer within {self._groups.timeout.total_seconds():g} s; start the processes "
            "again, from the last checkpoint"
        )

    def _gather(self, word: Word) -> list[Any]:
        said: list[Any] = [word, *[None] * len(self._in)]
        silent = {*word.get("silent", ())}
        # All at once: when a wait for one has taken too long, gloo ends the connections to all, but not what has come.
        coming = {k: _Coming(peer) for k, peer in self._in.items()}
        while coming:
            # Who waits in vain for somebody that waits in vain accuses the wrong one, whose own word is about to come.
            k = min(coming, key=lambda k: (k in silent, k))
            said[k] = coming.pop(k).word(min(_GRACE, self._groups.timeout) if k in silent else self._groups.timeout)
            silent.update((said[k] or {}).get("silent", ()))
        self._leave_word(said)
        for peer in self._out.values():
            if said[peer.member] is not None:
                with suppress(UnreachableError):
                    _wait(peer, _sent(peer, said))
        return said

    def _tell(self, word: Word) -> list[Any]:
        coming = _Coming(self._in[0])
        with suppress(UnreachableError):
            under_way = _sent(self._out[0], word)
            # Not waited for by itself: member 0 may be waiting for somebody else yet, as long as that may take.
            said = coming.word(2 * (self._groups.timeout + _GRACE))
            if said is not None:
                _wait(self._out[0], under_way)
                return said  # type: ignore[no-any-return]
        return self._word_left()

    def _leave_word(self, said: list[Any]) -> None:
        """If somebody is missing: gloo may have ended the other connections too, so leave their names in the store."""
        lost = [k for k, each in enumerate(said) if each is None]
        store = _store()
        if lost and store is not None:
            with suppress(RuntimeError):
                store.set(self._key, json.dumps(lost))

    def _word_left(self) -> list[Any]:
        """Member 0 is out of reach: has it left the names of others? Else it is the one that is missing."""
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

    def word(self, timeout: timedelta) -> Any:
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
