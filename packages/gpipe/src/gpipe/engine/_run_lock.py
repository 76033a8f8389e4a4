"""Serialize access to a pipe: only one thread at a time may run it.

All runs of a pipe share its parameters and their gradients, so a second thread waits until the first has left. A thread
that works for a run of the pipe, in a layer or a loss, would deadlock, and gets an error instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from threading import get_ident
from typing import TypeVar

import torch
from torch import Tensor

from streams import waiting

from .._current import current
from .._forks import fork_lock
from .._torch import set_grad_mode

RunLocks = tuple[object, ...]
"""Run locks of pipes, and other things that one thread has at a time: see :class:`Held`."""


T = TypeVar("T")


class _Inside(threading.local):
    """The run locks that concern this thread.

    Attributes:
        serves: the run locks of the runs that wait for this thread.
        holds: the run locks that it holds, outermost first.
        held: the other lock that it holds, if any.
    """

    serves: RunLocks = ()
    holds: RunLocks = ()
    held: Held | None = None


_inside = _Inside()


def locks_of_thread() -> RunLocks:
    """Return the run locks that cannot be released before this thread has finished."""
    return _inside.serves + _inside.holds


@contextmanager
def serving(run_locks: RunLocks) -> Iterator[None]:
    """Mark this thread as working for a run: acquiring one of ``run_locks`` would be a deadlock."""
    before = _inside.serves, _inside.holds
    try:
        _inside.serves, _inside.holds = run_locks, ()
        yield
    finally:
        _inside.serves, _inside.holds = before


class Held:
    """A lock that a thread has while it runs a layer, except while it waits for a run lock.

    Otherwise it would deadlock with the thread that has the run lock and waits for this lock.

    Args:
        thing: identifies the lock.

    Attributes:
        is_held: whether the thread has the lock.
    """

    def __init__(self, thing: object, lock: waiting.RLock) -> None:
        self._thing, self._lock = thing, lock
        self.is_held = False

    def acquire(self) -> None:
        """Wait for the lock.

        Raises:
            RuntimeError: waiting would be a deadlock with other threads.
        """
        with waiting_for(self._thing), self._lock:
            _waits.pop(get_ident(), None)
            # Once more, until release(). No interrupt can arrive between these two lines.
            self.is_held = True
            self._lock.acquire()
        _inside.held, _inside.holds = self, (*_inside.holds, self._thing)

    def release(self) -> None:
        """Release the lock, if the thread has it."""
        if not self.is_held:
            return
        holds = tuple([each for each in _inside.holds if each is not self._thing])
        _inside.held, _inside.holds, self.is_held = None, holds, False
        self._lock.release()

    def pause(self) -> None:
        """Release the lock until :meth:`resume`."""
        self.release()

    def resume(self) -> None:
        self.acquire()


@contextmanager
def waiting_for(wanted: object) -> Iterator[None]:
    """Record that this thread waits for ``wanted``, a run lock or the like.

    Raises:
        RuntimeError: the thread that has ``wanted`` waits for this thread, perhaps indirectly.
    """
    mine = locks_of_thread()
    if not mine:  # no thread can be waiting for this one
        yield
        return
    try:
        with _claims:
            _expect_no_cycle(wanted, {*mine})
            _waits[get_ident()] = mine, wanted
        yield
    finally:
        _waits.pop(get_ident(), None)  # atomic, and so without the lock


def _expect_no_cycle(wanted: object, mine: set[object]) -> None:
    # A run ends after all its threads, so its run lock is held as long as one of them waits for a run lock.
    reached, waits = {wanted}, [*_waits.copy().values()]
    while True:
        further = {other for held, other in waits if not reached.isdisjoint(held)} - reached
        if not further:
            break
        reached |= further
    if not reached.isdisjoint(mine):
        raise RuntimeError(
            "two threads would wait for each other forever: each runs a pipe with a layer, or code between blocks, "
            "that calls a pipe which the other thread runs; run these pipes in one thread, or call the layers instead "
            "of the pipe"
        )


class RunLock:
    """A reentrant lock that raises an error instead of a deadlock."""

    def __init__(self) -> None:
        self._lock = waiting.RLock()
        self._process: int | None = None  # the process of the thread inside

    def run(self, work: Callable[[], T]) -> T:
        """Wait until no other thread is inside, then return the result of ``work``, called inside.

        This is no context manager, because an interrupt at the end of one can skip its end, or delay it until the
        traceback is freed, when it would change the state of a later run.

        Raises:
            RuntimeError: waiting would be a deadlock, perhaps through further threads, or this process was forked
                while another thread was inside.
        """
        # A hook that this thread calls between forwards and backwards may use the pipe, as no cell is computing.
        if self in _inside.holds:
            return work()
        self._expect_an_end()
        held, before = _inside.held, (_inside.serves, _inside.holds)
        if held is not None:
            held.pause()
        # Reentrant, because after an interrupt this thread may hold the lock although ``_inside`` does not record it.
        with waiting_for(self), self._lock:
            _waits.pop(get_ident(), None)
            activity, grad = current.work, torch.is_grad_enabled()
            # An interrupt may arrive between any two lines, including the lines that restore the previous state.
            try:
                self._process = os.getpid()
                _inside.holds = (*_inside.holds, self)
                if held is not None:
                    held.resume()
                return work()
            finally:
                # Assignments first, because signals are handled only after calls.
                current.work, (_inside.serves, _inside.holds) = activity, before
                self._process = None
                try:
                    set_grad_mode(grad)  # torch.no_grad() does not restore it if interrupted
                finally:
                    _claimed.pop(self, None)

    def claim(self, parameters: Sequence[Tensor]) -> None:
        """Claim the gradients that this thread will accumulate while it holds the lock.

        Raises:
            RuntimeError: another thread is accumulating gradients of one of ``parameters`` in another pipe.
        """
        with _claims:
            # Pipes around this one wait for this thread, and accumulate nothing until then.
            known = (self, *locks_of_thread())
            # copy() is atomic. Other threads leave without the lock, because an interrupt could hit them while waiting.
            others = [theirs for other, theirs in _claimed.copy().items() if other not in known] if _claimed else []
            # Usually no other pipe is training, and then this costs nothing.
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
_waits: dict[int, tuple[tuple[object, ...], object]] = {}
"""The run locks held and wanted by each waiting thread. A forked child has none of these threads."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waits.clear)
_claimed: dict[RunLock, Sequence[Tensor]] = {}
"""The parameters whose gradients are being accumulated, by the run lock of the accumulating thread."""
