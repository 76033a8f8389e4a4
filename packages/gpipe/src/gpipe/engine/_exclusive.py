"""The critical section of a pipe: only one thread at a time may run it.

All runs of a pipe share its parameters and their gradients, so a second thread waits until the first has left. A thread
that works for a run of the pipe, in a layer or a loss, would wait forever, and gets an error instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor

from .._current import current
from .._forks import fork_lock

Sections = tuple["Section", ...]


class _Inside(threading.local):
    """Where this thread is.

    Attributes:
        serves: the sections of the runs that wait for this thread.
        holds: the sections that it is inside of, the outermost first.
    """

    serves: Sections = ()
    holds: Sections = ()


_inside = _Inside()


def sections_of_thread() -> Sections:
    """The sections that cannot be left before this thread is done."""
    return _inside.serves + _inside.holds


@contextmanager
def serving(sections: Sections) -> Iterator[None]:
    """A context for a thread that works for a run: entering one of ``sections`` would be to wait for itself."""
    before = _inside.serves, _inside.holds
    try:
        _inside.serves, _inside.holds = sections, ()
        yield
    finally:
        _inside.serves, _inside.holds = before


class Section:
    """A lock that its owner may take again, and that raises an error where a plain lock would deadlock."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: int | None = None  # that of the thread inside

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Wait until no other thread is inside, then enter.

        Raises:
            RuntimeError: waiting would be a deadlock; or this process was forked while another thread was inside.
        """
        # A hook that this thread calls between two walks of the run may use the pipe: no cell computes meanwhile.
        if self in _inside.holds:
            yield
            return
        self._expect_an_end()
        # Reentrant: an interrupt may have left the section to this thread without a trace in ``_inside``.
        with self._lock:
            self._process = os.getpid()
            work, before, grad = current.work, (_inside.serves, _inside.holds), torch.is_grad_enabled()
            # An interrupt may come between any two lines, also of those that put back what is current.
            try:
                _inside.holds = (*_inside.holds, self)
                yield
            finally:
                current.work, (_inside.serves, _inside.holds) = work, before
                torch.set_grad_enabled(grad)  # torch.no_grad() leaves it off if it is interrupted
                self._process = None
                _claimed.pop(self, None)

    def claim(self, parameters: Sequence[Tensor]) -> None:
        """Inside: say whose gradients this thread is going to accumulate.

        Raises:
            RuntimeError: another thread is accumulating those of one of ``parameters``, in another pipe.
        """
        with _claims:
            # A pipe around this one waits for this thread, and accumulates nothing meanwhile.
            known = (self, *sections_of_thread())
            # Copied, which is one operation: others leave without the lock, since a wait there may be interrupted.
            others = [theirs for other, theirs in _claimed.copy().items() if other not in known] if _claimed else []
            # There is rarely another pipe in training, and without one this costs nothing.
            if others and not {*map(id, parameters)}.isdisjoint(map(id, chain.from_iterable(others))):
                raise RuntimeError(
                    "another thread is training another pipe with some of the same parameters, and gradients of both "
                    "would be lost; train one after the other, or in one thread"
                )
            _claimed[self] = parameters

    def _expect_an_end(self) -> None:
        if self._process not in (None, os.getpid()):
            raise RuntimeError(
                "this process was forked while another thread was in a run of this pipe, so that gradients, hooks and "
                "buffers of its layers may be half-way between two states; fork between two runs, or build the model "
                "and the pipe anew in the child"
            )
        if self in _inside.serves:
            raise RuntimeError(
                "this would wait for itself forever: a layer or the loss function of a pipe calls the pipe itself, or "
                "another pipe whose layers do, while a run waits for all its layers; call the layers that are needed "
                "instead of the pipe, and put use_reentrant=True into a torch.utils.checkpoint around a pipe"
            )


_claims = fork_lock()
_claimed: dict[Section, Sequence[Tensor]] = {}
"""Of sections that some thread is inside of: the parameters whose gradients it accumulates."""
