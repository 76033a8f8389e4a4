"""The random number generators of the interpreter: Python's ``random``, and NumPy's global one."""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from streams import has_streams

from .._forks import fork_lock
from ..engine._run_lock import holding

_PYTHON, _NUMPY = "Python's random", "numpy.random"


def generator_states() -> dict[str, Any]:
    """Return the state of each generator that may be in use, by its name."""
    states: dict[str, Any] = {_PYTHON: random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":  # user code may have set a different kind of generator
            states[_NUMPY] = state
    return states


def set_generator_states(states: dict[str, Any]) -> None:
    random.setstate(states[_PYTHON])
    if _NUMPY in states:
        sys.modules["numpy"].random.set_state(states[_NUMPY])


def find_changed_generators(before: dict[str, Any]) -> list[str]:
    """Return the names of generators whose state is different from the one in ``before``."""
    now = generator_states()
    return [name for name in before if pickle.dumps(now.get(name)) != pickle.dumps(before[name])]


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the states afterwards."""
    before = generator_states()
    try:
        yield
    finally:
        set_generator_states(before)


@contextmanager
def every_generator_restored(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the states of the interpreter's generators, of torch's on the CPU, and of ``devices`` afterwards."""
    with generators_restored(), ExitStack() as scope:
        scope.enter_context(torch.random.fork_rng(devices=[]))
        for device in {device for device in devices if has_streams(device)}:
            scope.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
        yield


_GENERATORS = "the generators of the interpreter"
_lock = fork_lock()
"""Held while the generators of the interpreter have the states of one piece of a forward."""


class _Thread(threading.local):
    """Records whether this thread holds the lock."""

    is_inside = False


_thread = _Thread()
Drawing = dict[Any, bool]
"""Maps the key of a piece of a forward to whether the piece uses random numbers."""


class Numbers:
    """The random numbers that pieces of forwards take from generators of the interpreter, in one run.

    A piece is a call of a block, or the part between two calls. Stages run at the same time, so the order in which they
    take random numbers would depend on timing. Therefore the generators have a separate state for each piece that uses
    them, and no two such pieces run at the same time. These states are derived from the states before the run, which
    then advance by one number.

    Args:
        drawing: whether known pieces use random numbers. A piece that is not known yet may use them.
    """

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        # If a run is inside a piece of another pipe, its threads would deadlock with the thread that waits for them.
        self._is_nested = _thread.is_inside
        self._seeds: dict[str, int] = {}
        self._advanced: set[str] = set()

    def begin(self, key: Any, place: Sequence[int]) -> Callable[[], Sequence[str]]:
        """Begin a piece. Return a function that ends it, to be called on the same thread.

        That function returns the names of the generators that the piece has used.

        Args:
            key: the properties that determine whether the piece uses random numbers.
            place: numbers that are unique to the piece in this run.
        """
        if self._is_nested or not self._drawing.get(key, True):
            return _nothing
        held = ExitStack()
        held.enter_context(holding(_GENERATORS, _lock))
        outer, _thread.is_inside = _thread.is_inside, True
        before = generator_states()
        if not self._seeds:
            self._seeds = {name: _next_seed(name, state) for name, state in before.items()}
        for name, seed in self._seeds.items():
            _seed(name, [seed, *place])
        held.callback(setattr, _thread, "is_inside", outer)
        return partial(self._end, key, before, generator_states(), held)

    def _end(self, key: Any, before: dict[str, Any], own: dict[str, Any], held: ExitStack) -> Sequence[str]:
        drew = find_changed_generators(own)
        set_generator_states(before)
        for name in {*drew} - self._advanced:
            self._advanced.add(name)
            _advance(name)
        if len(self._drawing) >= _MOST:  # the sizes of inputs keep changing
            self._drawing.clear()
        if drew or sys.exc_info()[0] is None:  # a piece that failed may not have reached its first number
            self._drawing[key] = bool(drew) or self._drawing.get(key, False)
        held.close()
        return drew


_MOST = 1 << 14


def _nothing() -> Sequence[str]:
    return ()


def _next_seed(name: str, state: Any) -> int:
    """Return the random number that a generator in this ``state`` returns next, in :func:`_advance`."""
    if name == _PYTHON:
        generator = random.Random()
        generator.setstate(state)
        return generator.getrandbits(32)
    generators = sys.modules["numpy"].random
    copied = generators.RandomState()
    copied.set_state(state)
    return int(copied.randint(2**32, dtype="uint32"))


def _advance(name: str) -> None:
    if name == _PYTHON:
        random.getrandbits(32)
    else:
        sys.modules["numpy"].random.randint(2**32, dtype="uint32")


def _seed(name: str, numbers: Sequence[int]) -> None:
    if name == _PYTHON:
        random.seed(sum(number << 32 * k for k, number in enumerate(numbers)))
    else:
        sys.modules["numpy"].random.seed(numbers)
