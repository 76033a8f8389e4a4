"""Messages from the rank of the first stage to all others when a run begins. They are not answered."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from ._errors import UnreachableError
from ._mail import Mail
from ._messages import Peer


class Announcements:
    """Announcements of runs.

    Args:
        peers: all other ranks, on the rank that announces; else that rank alone.
        tells: whether this process is that rank.
    """

    def __init__(self, peers: Sequence[Peer], *, tells: bool) -> None:
        self._mails = [Mail(peer, None) if tells else Mail(None, peer) for peer in peers]
        self._tells = tells
        if not tells:
            self._mails[0].expect()

    def tell(self, what: Any) -> None:
        """Send ``what`` to all other ranks.

        Raises:
            UnreachableError: a rank cannot be reached; the message is on its way to all others.
        """
        data, lost = pickle.dumps(what), None
        for mail in self._mails:
            try:
                mail.send(data)
            except UnreachableError as error:
                lost = error
        if lost is not None:
            raise lost

    def hear(self) -> Any:
        """Wait for the next message, and return what it holds.

        Raises:
            UnreachableError: the connection has ended, or the message does not arrive in time.
        """
        heard = self._mails[0].receive()
        self._mails[0].expect()
        return heard

    def flush(self) -> None:
        """Wait until all messages have been received. Raises UnreachableError if a rank has not received one."""
        for mail in self._mails if self._tells else ():
            mail.flush()
