"""Exceptions raised by multi-process pipelines."""

from __future__ import annotations

from collections.abc import Sequence


class RemoteError(RuntimeError):
    """Another rank failed, so this rank's step was cancelled. The message names the rank, the place and the error."""


class LostRankError(ConnectionError):
    """Another rank has exited or does not respond. The pipe is unusable: restart all processes."""


class UnreachableError(Exception):
    """A message could not be sent or received. Never reaches the caller.

    Attributes:
        member: the index of the member at the other end.
        silent: True if the wait timed out, False if the connection was closed.
    """

    def __init__(self, member: int, error: BaseException) -> None:
        super().__init__(str(error))
        self.member = member
        self.silent = "imed out" in str(error)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return the beginning of a sentence about these ranks, such as ``rank 1 has``."""
    listed = ", ".join(map(str, ranks))
    return f"rank {listed} has" if len(ranks) == 1 else f"ranks {listed} have"


def format_error(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", []))
        return f"{kind}: {error}{notes}"
    except Exception as failed:  # other ranks wait for the report of any error
        return f"{kind}, whose message cannot be formatted: {type(failed).__name__}"


def is_of_gloo(text: str) -> bool:
    """Return whether this is the message of a gloo error. Gloo has no exception class for closed connections."""
    return "gloo/transport" in text or "pair closure" in text
