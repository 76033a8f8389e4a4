"""What goes wrong between processes."""

from __future__ import annotations


class RemoteError(RuntimeError):
    """Another rank failed, and so this one's step was given up. The text says which, where, and how."""


class LostRankError(ConnectionError):
    """Another rank ended, or does not answer. The pipe is of no use any more: the processes have to start again."""


class UnreachableError(Exception):
    """A message could not be sent or received. Never reaches the caller.

    Attributes:
        member: with whom.
        silent: whether the time was over; if not, the connection has ended.
    """

    def __init__(self, member: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.member = member
        self.silent = "imed out" in str(error)


def text_of(error: BaseException) -> str:
    """What other ranks are told of an error: its type, its text, and its notes."""
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {error}{notes}"
