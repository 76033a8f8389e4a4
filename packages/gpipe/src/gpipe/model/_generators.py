"""The random number generators of the interpreter: Python's ``random``, and NumPy's global one."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from streams import has_streams

from .._forks import fork_lock
from ..engine._run_lock import Held, locks_of_thread

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
    """Restore the states afterwards. No piece of another forward runs in between."""
    held = Held(_GENERATORS, _lock)
    try:
        if not is_locked():
            held.acquire()
        before = generator_states()
        try:
            yield
        finally:
            set_generator_states(before)
    finally:
        held.release()


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


def is_locked() -> bool:
    """Return whether the lock is held by this thread, or by one that waits for it."""
    return _GENERATORS in locks_of_thread()


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

    Attributes:
        is_nested: whether the run is inside a piece of another pipe, whose thread has the lock and waits for the run.
            Then its pieces are not told apart, as their threads would wait for that lock forever.
    """

    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing
        self.is_nested = is_locked()
        self._seeds: dict[str, int] = {}
        self._advanced: set[str] = set()

    def begin(self, key: Any, place: Sequence[int]) -> Callable[[], Sequence[str]]:
        """Begin a piece. Return a function that ends it, to be called on the same thread.

        That function returns the names of the generators that the piece has used.

        Args:
            key: the properties that determine whether the piece uses random numbers.
            place: numbers that are unique to the piece in this run.
        """
        if is_locked() or not self._drawing.get(key, True):
            return _nothing
        piece = _Piece(self, key, place)
        try:
            piece.acquire()
            piece.begin()
        except BaseException:
            piece.release()
            raise
        return piece.end

    def seed(self, states: dict[str, Any], place: Sequence[int]) -> None:
        """Give the generators the states of the piece at ``place``, in a run that begins with these ``states``."""
        if not self._seeds:
            self._seeds = {name: _next_seed(name, state) for name, state in states.items()}
        for name, seed in self._seeds.items():
            _seed(name, [seed, *place])

    def learn(self, key: Any, drew: Sequence[str]) -> None:
        """Record which generators a piece has used, and let these advance."""
        for name in {*drew} - self._advanced:
            self._advanced.add(name)
            _advance(name)
        if len(self._drawing) >= _MOST:  # the sizes of inputs keep changing
            self._drawing.clear()
        if drew or sys.exc_info()[0] is None:  # a piece that failed may not have reached its first number
            self._drawing[key] = bool(drew) or self._drawing.get(key, False)


class _Piece(Held):
    """A piece that has begun: the lock, and the piece's own states of the generators."""

    def __init__(self, numbers: Numbers, key: Any, place: Sequence[int]) -> None:
        super().__init__(_GENERATORS, _lock)
        self._numbers, self._key, self._place = numbers, key, place

    def begin(self) -> None:
        self._before = generator_states()
        try:
            self._numbers.seed(self._before, self._place)
            self._first = generator_states()
        except BaseException:
            set_generator_states(self._before)
            raise

    def pause(self) -> None:
        self._paused = generator_states()
        set_generator_states(self._before)
        super().pause()

    def resume(self) -> None:
        super().resume()
        self._before = generator_states()
        set_generator_states(self._paused)

    def end(self) -> Sequence[str]:
        """End the piece. Return the names of the generators that it has used."""
        if not self.is_held:  # an error while it waited
            return ()
        try:
            drew = find_changed_generators(self._first)
            set_generator_states(self._before)
            self._numbers.learn(self._key, drew)
        finally:
            self.release()
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
