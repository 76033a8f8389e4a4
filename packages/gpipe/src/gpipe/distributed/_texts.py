"""Small messages of JSON between ranks: one transfer each, for which memory may be ready before they come."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ._errors import UnreachableError
from ._messages import Peer

_LENGTH = struct.Struct("=q")
_HEAD = _LENGTH.size
_SMALL = 2**12  # bytes of a message that is sent in one transfer

Transfers = list[tuple[Any, Tensor]]


def sent(peer: Peer, text: str) -> Transfers:
    """What is under way, with the memory that must stay till then.

    Raises:
        UnreachableError: the connection has ended.
    """
    data = text.encode()
    head = _LENGTH.pack(len(data))
    parts = [head + data] if _HEAD + len(data) <= _SMALL else [head, data]
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
    return [(peer.send(tensor), tensor) for tensor in tensors]


def wait(peer: Peer, transfers: Transfers) -> None:
    """Wait until they have arrived.

    Raises:
        UnreachableError: they do not.
    """
    for work, _ in transfers:
        peer.wait(work)


def joined(texts: Sequence[str]) -> str:
    """The text of a list of what these are the texts of."""
    return f"[{','.join(texts)}]"


class Inbox:
    """Messages from one rank, for the next of which there is memory before it comes.

    Args:
        peer: who sends them.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._memory = bytearray(_SMALL)
        self._frame = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._posted: Any = None

    def post(self) -> None:
        """Let the next one come, if that has not been done. :meth:`text` says whether it has worked."""
        with suppress(UnreachableError):
            self._post()

    def text(self, timeout: timedelta | None = None) -> str:
        """Wait for the next one.

        Args:
            timeout: how long; as long as the group does by default.

        Raises:
            UnreachableError: it does not come.
        """
        self._post()
        self._peer.wait(self._posted, timeout)
        self._posted = None
        (size,) = _LENGTH.unpack_from(self._memory)
        if _HEAD + size <= _SMALL:
            return self._memory[_HEAD : _HEAD + size].decode()
        return self._rest(size, timeout)

    def _post(self) -> None:
        if self._posted is None:
            self._posted = self._peer.receive(self._frame)

    def _rest(self, size: int, timeout: timedelta | None) -> str:
        memory = bytearray(size)
        self._peer.wait(self._peer.receive(torch.frombuffer(memory, dtype=torch.uint8)), timeout)
        return memory.decode()


class Announcements:
    """What the rank of the first stage tells all others when a run begins. Nobody answers, so that nobody waits for it.

    Args:
        tells: whether this is that rank.
        peers: the others then, else that rank.
    """

    def __init__(self, peers: Sequence[Peer], *, tells: bool) -> None:
        self.tells = tells
        self._peers = peers
        self._under_way: list[tuple[Peer, Transfers]] = []
        self._inbox = None if tells else Inbox(*peers)
        if self._inbox is not None:
            self._inbox.post()

    def tell(self, what: Any) -> None:
        """Send it to all.

        Raises:
            UnreachableError: there is somebody whom it does not reach; it is under way to all others.
        """
        text, lost = json.dumps(what), None
        for peer in self._peers:
            try:
                self._under_way.append((peer, sent(peer, text)))
            except UnreachableError as error:
                lost = error
        if lost is not None:
            raise lost

    def hear(self) -> Any:
        """Wait for what that rank tells.

        Raises:
            UnreachableError: it does not.
        """
        assert self._inbox is not None
        heard = json.loads(self._inbox.text())
        self._inbox.post()
        return heard

    def flush(self) -> None:
        """All have heard it: let its memory go.

        Raises:
            UnreachableError: somebody has not.
        """
        under_way, self._under_way = self._under_way, []
        for peer, transfers in under_way:
            wait(peer, transfers)
