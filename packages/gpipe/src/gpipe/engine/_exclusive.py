"""The critical section of a pipe: only one thread at a time may run it.

All runs of a pipe share its parameters and their gradients. While a backward or a step accumulates gradients outside of
``.grad``, no other run may read or change them. So a second thread waits until the first has left. If the first thread
in turn waits for the second, that would be a deadlock, and the second gets an error instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from torch import Tensor

from .._current import current

Sections = tuple["Section", ...]


class Section:
    """A lock that its owner may take again, and that raises an error where a plain lock would deadlock."""

    def __init__(self) -> None:
        self._forked = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Wait until no other thread is inside, then enter.

        Raises:
            RuntimeError: waiting would be a deadlock; or this process was forked while another thread was inside.
        """
        if self in current.holds:
            yield
            return
        before = {**vars(current)}
        self._take()
        # An interrupt may come between any two lines, also of those that put back what is current.
        try:
            current.holds = (*current.holds, self)
            yield
        finally:
            own = vars(current)
            for name in own.keys() - before.keys():
                del own[name]
            own.update(before)
            self._leave()

    def claim(self, parameters: Sequence[Tensor]) -> None:
        """Inside: say whose gradients this thread is going to accumulate.

        Raises:
            RuntimeError: another thread is accumulating those of one of ``parameters``, in another pipe.
        """
        with _turns:
            others = [theirs for other, theirs in _claimed.items() if other is not self and other not in involved()]
            if others and not {*map(id, parameters)}.isdisjoint(map(id, chain.from_iterable(others))):
                raise RuntimeError(
                    "another thread is training another pipe with some of the same parameters, and gradients of both "
                    "would be lost; train one after the other, or in one thread"
                )
            _claimed[self] = parameters

    def _take(self) -> None:
        with _turns:
            if self._forked or current.serves:
                self._expect_an_end()
            # A section that this thread is inside of already was left by an interrupt.
            if self in _inside and _inside[self] != threading.get_ident():
                self._wait()
            _inside[self] = threading.get_ident()

    def _leave(self) -> None:
        with _turns:
            if self in _inside and _inside[self] == threading.get_ident():
                del _inside[self]
                _claimed.pop(self, None)
                _turns.notify_all()

    def _wait(self) -> None:
        _waiting[threading.get_ident()] = involved(), self
        try:
            _turns.wait_for(lambda: self not in _inside)
        finally:
            del _waiting[threading.get_ident()]

    def _expect_an_end(self) -> None:
        if self._forked:
            raise RuntimeError(
                "this process was forked while another thread was in a run of this pipe, so that gradients, hooks and "
                "buffers of its layers may be half-way between two states; fork between two runs, or build the model "
                "and the pipe anew in the child"
            )
        if not _needed_by(self).isdisjoint(current.serves):
            raise RuntimeError(
                "this would wait for itself forever: a layer or the loss function of a pipe calls the pipe itself, or "
                "another pipe whose layers do, while a run waits for all its layers; call the layers that are needed "
                "instead of the pipe, and put use_reentrant=True into a torch.utils.checkpoint around a pipe"
            )


_turns = threading.Condition()
_inside: dict[Section, int] = {}
"""The thread, by its id, that is inside of a section."""
_claimed: dict[Section, Sequence[Tensor]] = {}
"""Of sections that some thread is inside of: the parameters whose gradients it accumulates."""
_waiting: dict[int, tuple[Sections, Section]] = {}
"""For each waiting thread, by its id: the sections that cannot be left before it goes on, and the one it waits for."""


def involved() -> Sections:
    """The sections that cannot be left before this thread goes on."""
    return current.serves + current.holds


@contextmanager
def serving(sections: Sections) -> Iterator[None]:
    """A context in which this thread works for runs that are in ``sections`` and wait for it."""
    before = current.serves, current.holds
    current.serves, current.holds = sections, ()
    try:
        yield
    finally:
        current.serves, current.holds = before


def _needed_by(section: Section) -> set[Section]:
    """All sections that have to be left before ``section`` can be entered, followed from thread to thread."""
    needed, found = set[Section](), {section}
    while found:
        needed |= found
        found = {wanted for waits, wanted in _waiting.values() if not needed.isdisjoint(waits)} - needed
    return needed


def _after_fork() -> None:
    """In a forked child only the calling thread exists: forget what the other threads held, and waited for."""
    global _turns
    _turns = threading.Condition()
    _waiting.clear()
    for section in [section for section in _inside if section not in current.holds]:
        del _inside[section]
        section._forked = True
        _claimed.pop(section, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
