"""Layers that read or set torch's generator get the generator of their cell instead.

``torch.get_rng_state``, ``set_rng_state``, ``manual_seed`` and ``fork_rng``, which ``torch.utils.checkpoint`` uses too,
call methods of the one generator of the process. No function of torch is replaced: a profile function of the thread
sees the begin and the end of such a call. During the call the process's generator has the state of the cell's::

    layer            torch.get_rng_state() -------------> returns
    profile function       c_call                c_return
    process's state  P --> cell's --- get_state ---> P
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Final

import torch
from torch.utils import checkpoint

from .._forks import fork_lock

PROCESS: Final = torch.default_generator
"""The generator of the process."""

_READING = frozenset(["get_state", "initial_seed", "clone_state", "graphsafe_get_state"])
borrowing = fork_lock()
"""Held while the process's generator has the state of another one. Hold it to read the generator's own state."""


@contextmanager
def lent(generator: torch.Generator, *, changes: bool = True) -> Iterator[None]:
    """A context in which the process's generator has the state of ``generator``, which takes the new state if it
    ``changes``.
    """
    with borrowing:
        before = PROCESS.get_state()
        PROCESS.set_state(generator.get_state())
        try:
            yield
        finally:
            if changes:
                generator.set_state(PROCESS.get_state())
            PROCESS.set_state(before)


def can_serve() -> bool:
    """Whether this thread can have a :class:`Served`: profilers written in C, such as cProfile, take its place."""
    return sys.getprofile() is None or callable(sys.getprofile())


class Served:
    """A context in which methods of the process's generator that this thread calls act on another one.

    Args:
        ask: returns the other generator; called for each such call, with whether the call changes the generator.
    """

    def __init__(self, ask: Callable[[bool], torch.Generator]) -> None:
        self._ask = ask
        self._call: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        self._others = None if isinstance(getattr(self._before, "__self__", None), Served) else self._before
        with borrowing:  # Python counts the threads that have one, without a lock where it has no global one (3.13)
            sys.setprofile(self._watch)

    def __exit__(self, *_: object) -> None:
        with borrowing:
            sys.setprofile(self._before)

    def _watch(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._others is not None:
            self._others(frame, event, argument)  # type: ignore[arg-type]
        if event == "c_call":
            if argument.__self__ is PROCESS and not _ours(frame):
                changes = argument.__name__ not in _READING
                self._call = lent(self._ask(changes), changes=changes)
                self._call.__enter__()
        elif self._call is not None and event in _ENDS:
            call, self._call = self._call, None
            call.__exit__(None, None, None)


_ENDS = frozenset(["c_return", "c_exception"])
_OURS = frozenset([__name__, f"{__package__}._random"])


def _ours(frame: FrameType) -> bool:
    """Whether the caller is this package."""
    return frame.f_globals.get("__name__") in _OURS


def is_process(generator: torch.Generator) -> bool:
    """Whether ``generator`` is that of the process. See :func:`are_one`."""
    if generator.device.type != "cpu":
        return False
    with borrowing:
        return generator.initial_seed() == PROCESS.initial_seed() and are_one(generator, PROCESS)


def are_one(a: torch.Generator, b: torch.Generator) -> bool:
    """Whether both objects are the same generator: operations get a new Python object for it each time."""
    state = a.get_state()
    if a.device != b.device or not torch.equal(b.get_state(), state):
        return False
    torch.empty(1, device=a.device).uniform_(generator=a)
    moved = not torch.equal(b.get_state(), state)
    a.set_state(state)
    return moved


def in_checkpoint() -> bool:
    """Whether the caller runs inside ``torch.utils.checkpoint``, which will want to draw the same numbers again."""
    if torch.is_grad_enabled() and torch._C._is_fwd_grad_enabled() and _saved_tensors_hooks(True) is None:
        return False  # a checkpoint that will compute again changes one of these; to look at all callers takes longer
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CHECKPOINT:
            given = frame.f_locals.get("preserve_rng_state", True)  # an argument since PyTorch 2.15
            return bool(frame.f_locals.get("preserve", given))
        frame = frame.f_back
    return False


_saved_tensors_hooks: Final = torch._C._autograd._top_saved_tensors_default_hooks
_CHECKPOINT = inspect.unwrap(checkpoint.checkpoint).__code__
