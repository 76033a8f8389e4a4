"""Errors of pipelines in several processes."""

from __future__ import annotations

from collections.abc import Sequence


class RemoteError(RuntimeError):
    """Another rank failed, so the step of this one was cancelled. The message says which rank, where, and how."""


class LostRankError(ConnectionError):
    """Another rank has ended, or does not answer. The pipe cannot be used any more: start the processes again."""


class UnreachableError(Exception):
    """A message could not be sent or received. Never reaches the caller.

    Attributes:
        member: the other end.
        silent: True if the wait took too long, False if the connection has ended.
    """

    def __init__(self, member: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.member = member
        self.silent = "imed out" in str(error)


def named(ranks: Sequence[int]) -> str:
    """The start of a sentence of what these ranks have done."""
    listed = ", ".join(map(str, ranks))
    return f"rank {listed} has" if len(ranks) == 1 else f"ranks {listed} have"


def text_of(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
        return f"{kind}: {error}{notes}"
    except Exception as failed:  # others wait for the report of this error, whatever it is
        return f"{kind}, whose text cannot be made: {type(failed).__name__}"


def is_of_gloo(text: str) -> bool:
    """Whether an error that reads so is gloo's, which has no class for a closed connection."""
    return "gloo/transport" in text or "pair closure" in text
