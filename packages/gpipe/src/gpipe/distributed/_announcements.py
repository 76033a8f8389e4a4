"""Messages from the rank of the first stage to all others when a run begins. They are not answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._errors import UnreachableError
from ._messages import RemoteLink


class Announcements:
    """Announcements of runs.

    Args:
        links: to all other ranks, on the rank that announces; else to that rank alone.
        tells: whether this process is that rank.
    """

    def __init__(self, links: Sequence[RemoteLink], *, tells: bool) -> None:
        self._links = links
        self._tells = tells
        if not tells:
            self._links[0].expect(1)

    def tell(self, what: Any) -> None:
        """Send ``what`` to all other ranks.

        Raises:
            UnreachableError: a rank cannot be reached; the message is on its way to all others.
        """
        lost = None
        for link in self._links:
            try:
                link.tell(what)
            except UnreachableError as error:
                lost = error
        if lost is not None:
            raise lost

    def hear(self) -> Any:
        """Wait for the next message, and return what it holds.

        Raises:
            UnreachableError: the connection has ended, or the message does not arrive in time.
        """
        heard = self._links[0].hear()
        self._links[0].expect(1)
        return heard

    def flush(self) -> None:
        """Wait until all messages have been received. Raises UnreachableError if a rank has not received one."""
        for link in self._links if self._tells else ():
            link.flush()
