"""Messages of JSON between ranks. A small one takes one transfer, which may be posted before the message is sent."""

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
    """Start to send ``text``.

    Returns:
        The transfers, each with the tensor that must live until it has ended; see :func:`wait`.

    Raises:
        UnreachableError: the connection has ended.
    """
    data = text.encode()
    head = _LENGTH.pack(len(data))
    parts = [head + data] if _HEAD + len(data) <= _SMALL else [head, data]
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
    return [(peer.send(tensor), tensor) for tensor in tensors]


def wait(peer: Peer, transfers: Transfers) -> None:
    """Wait until ``transfers`` have ended.

    Raises:
        UnreachableError: the connection has ended, or a transfer takes too long.
    """
    for work, _ in transfers:
        peer.wait(work)


def joined(texts: Sequence[str]) -> str:
    """The JSON list of values that are JSON already."""
    return f"[{','.join(texts)}]"


class Inbox:
    """Receives messages from one rank, into memory that is set aside for the next one.

    Args:
        peer: the rank that sends them.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._memory = bytearray(_SMALL)
        self._frame = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._posted: Any = None

    def post(self) -> None:
        """Start to receive the next message, unless that has begun. If this fails, :meth:`text` raises."""
        with suppress(UnreachableError):
            self._post()

    def text(self, timeout: timedelta | None = None) -> str:
        """Wait for the next message, and return its text.

        Args:
            timeout: how long to wait; the timeout of the group by default.

        Raises:
            UnreachableError: the connection has ended, or the message does not arrive in time.
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
    """Messages from the rank of the first stage to all others when a run begins. They are not answered.

    Args:
        tells: whether this process is that rank.
        peers: all other ranks if it is, else that rank alone.
    """

    def __init__(self, peers: Sequence[Peer], *, tells: bool) -> None:
        self.tells = tells
        self._peers = peers
        self._under_way: list[tuple[Peer, Transfers]] = []
        self._inbox = None if tells else Inbox(*peers)
        if self._inbox is not None:
            self._inbox.post()

    def tell(self, what: Any) -> None:
        """Send ``what`` to all other ranks.

        Raises:
            UnreachableError: a rank cannot be reached; the message is on its way to all others.
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
        """Wait for the next message, and return what it holds.

        Raises:
            UnreachableError: the connection has ended, or the message does not arrive in time.
        """
        assert self._inbox is not None
        heard = json.loads(self._inbox.text())
        self._inbox.post()
        return heard

    def flush(self) -> None:
        """Wait until all messages have been received, and free their memory.

        Raises:
            UnreachableError: a rank has not received one.
        """
        under_way, self._under_way = self._under_way, []
        for peer, transfers in under_way:
            wait(peer, transfers)
