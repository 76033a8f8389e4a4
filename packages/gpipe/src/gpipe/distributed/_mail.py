"""Objects between two ranks: announcements and reports."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any, Final

from ..values._leaves import Activation
from ._messages import Peer, Receiver, Sender

_SMALL: Final = 2**12
"""Bytes of the largest message that is one transfer."""


class Mail:
    """The two directions between this rank and another one, for objects that can be pickled.

    Args:
        out, into: the other end of what is sent, and of what is received; None for a direction that is not used.
    """

    def __init__(self, out: Peer | None, into: Peer | None) -> None:
        self._sender = None if out is None else Sender(out, small=_SMALL)
        self._receiver = None if into is None else Receiver(into, small=_SMALL)

    def send(self, data: bytes) -> None:
        """Start to send ``data``. Raises UnreachableError if the connection has ended."""
        assert self._sender is not None
        self._sender.put(0, Activation(data, ()))

    def flush(self, timeout: timedelta | None = None) -> None:
        """Wait until everything has been received. Raises UnreachableError."""
        assert self._sender is not None
        self._sender.flush(timeout)

    def expect(self) -> None:
        """Start to receive the next message, unless that has begun. If this fails, :meth:`receive` raises."""
        assert self._receiver is not None
        self._receiver.expect(1)

    def receive(self, timeout: timedelta | None = None) -> Any:
        """Wait for the next message; by default as long as the timeout of the group. Raises UnreachableError."""
        assert self._receiver is not None
        return pickle.loads(self._receiver.get(timeout)[2].value)
