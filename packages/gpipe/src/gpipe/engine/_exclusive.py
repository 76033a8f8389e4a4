"""The critical section of a pipe: of all threads, one at a time is in a run of it.

Parameters and their gradients belong to the pipe, not to a run. While a backward or a step accumulates gradients
outside of ``.grad``, another run must neither see that nor accumulate into it. So a thread that comes while another one
is inside waits for its turn. Where that would be for ever, because the run that it waits for waits for this thread, it
gets an error instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .._current import Section as AnySection
from .._current import current

Sections = tuple[AnySection, ...]


class Section:
    """A section that one thread at a time may be in; that thread may enter it again."""

    def __init__(self) -> None:
        self._forked = False

    @contextmanager
    def entered(self, *, accumulates: bool = False) -> Iterator[None]:
        """Wait until no other thread is inside, and be inside.

        Args:
            accumulates: inside, gradients are accumulated, so that the model is half-way from one state to the next.

        Raises:
            RuntimeError: waiting would never end; or this process was forked while another thread was inside and
                accumulated gradients.
        """
        if self in current.holds:
            yield
            return
        self._take(accumulates)
        current.holds = (*current.holds, self)
        try:
            yield
        finally:
            current.holds = current.holds[:-1]
            with _turns:
                del _inside[self]
                _turns.notify_all()

    def _take(self, accumulates: bool) -> None:
        with _turns:
            if self._forked or current.serves:
                self._expect_an_end()
            if self in _inside:
                self._wait()
            _inside[self] = accumulates

    def _wait(self) -> None:
        _waiting[threading.get_ident()] = involved(), self
        try:
            _turns.wait_for(lambda: self not in _inside)
        finally:
            del _waiting[threading.get_ident()]

    def _expect_an_end(self) -> None:
        if self._forked:
            raise RuntimeError(
                "this process was forked while another thread was in a backward or a step of this pipe, so that "
                "gradients, hooks and buffers of its layers may be half-way between two states; fork between two runs, "
                "or build the model and the pipe anew in the child"
            )
        if not _needed_by(self).isdisjoint(current.serves):
            raise RuntimeError(
                "this would wait for itself for ever: a layer or the loss function of a pipe calls the pipe itself, or "
                "another pipe whose layers do, while a run waits for all its layers; call the layers that are needed "
                "instead of the pipe, and put use_reentrant=True into a torch.utils.checkpoint around a pipe"
            )


_turns = threading.Condition()
_inside: dict[Section, bool] = {}
"""The sections that a thread is inside of, and whether it accumulates gradients there."""
_waiting: dict[int, tuple[Sections, Section]] = {}
"""The threads that wait: the sections that wait for each of them in turn, and the one it waits for."""


def involved() -> Sections:
    """The sections that are not left before this thread goes on."""
    return current.serves + current.holds


@contextmanager
def serving(sections: Sections) -> Iterator[None]:
    """Inside, this thread works for runs in ``sections``, which wait for it."""
    before = current.serves, current.holds
    current.serves, current.holds = sections, ()
    try:
        yield
    finally:
        current.serves, current.holds = before


def _needed_by(section: Section) -> set[Section]:
    """What has to be left before ``section`` can be: itself, and what threads wait for that it waits for."""
    needed, found = set[Section](), {section}
    while found:
        needed |= found
        found = {wanted for waits, wanted in _waiting.values() if not needed.isdisjoint(waits)} - needed
    return needed


def _after_fork() -> None:
    """In the child only the thread that forked is left: nobody else is inside of anything, or waits."""
    global _turns
    _turns = threading.Condition()
    _waiting.clear()
    for section in [section for section in _inside if section not in current.holds]:
        section._forked = _inside.pop(section)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
