"""The random number generators of the interpreter: Python's ``random``, and NumPy's global one."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from streams import has_streams, waiting

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


def find_changed_generators(before: dict[str, Any], now: dict[str, Any] | None = None) -> list[str]:
    """Return the names of generators whose state ``now``, by default the current one, is not as in ``before``."""
    now = generator_states() if now is None else now
    return [name for name in before if name not in now or not _are_equal(before[name], now[name])]


def _are_equal(a: Any, b: Any) -> bool:
    """Return whether two states are equal. NumPy's are dicts with an array."""
    return bool(a == b if isinstance(a, tuple) else pickle.dumps(a) == pickle.dumps(b))


_GENERATORS = "the generators of the interpreter"
_lock = fork_lock()
"""Held while the generators of the interpreter have the states of one piece of a forward."""


def is_locked() -> bool:
    """Return whether the lock is held by this thread, or by one that waits for it."""
    return _GENERATORS in locks_of_thread()


class _Changes:
    """Tells whether the generators have the states from before all runs.

    Attributes:
        by: what last gave them other states.
        count: how many times something did.
        advances: how many times a run has advanced one of them.
    """

    by: Held | None = None
    count = advances = 0


_changes = _Changes()


def _observe() -> dict[str, Any] | None:
    """Return the states from before all runs, advanced by them; None if a thread has its own states now."""
    count = _changes.count
    if _changes.by is not None and _changes.by.is_held:
        return None
    states = generator_states()
    return states if count == _changes.count else None


class OwnStates(Held):
    """Separate states of the generators for what a thread does between :meth:`begin` and :meth:`end`.

    No two threads have their own states at the same time. While a thread waits for a pipe, the generators have the
    states from before. Inside another object of this class, only the states are restored at the end.
    """

    def __init__(self, thing: object = _GENERATORS, lock: waiting.RLock | None = None) -> None:
        super().__init__(thing, _lock if lock is None else lock)
        self._is_inner = thing is _GENERATORS and is_locked()

    def begin(self) -> None:
        """Wait until no other thread has its own states. At first, they are those from before."""
        try:
            if not self._is_inner:
                self.acquire()
                self._note()
            self._before = self._first = generator_states()
        except BaseException:
            self.release()
            raise

    def pause(self) -> None:
        self._paused = generator_states()
        set_generator_states(self._before)
        super().pause()

    def resume(self) -> None:
        super().resume()
        self._note()
        self._before = generator_states()
        set_generator_states(self._paused)

    def end(self, then: Callable[[Sequence[str]], None] | None = None) -> list[str]:
        """Restore the states from before. Return the names of the generators that were used.

        Args:
            then: called with these names before another thread may begin.
        """
        if not (self.is_held or self._is_inner):  # an error while it waited
            return []
        self._is_inner = False
        try:
            drew = find_changed_generators(self._first)
            set_generator_states(self._before)
            if then is not None:
                then(drew)
        finally:
            if _changes.by is self:
                _changes.by = None
            self.release()
        return drew

    def _note(self) -> None:
        if self._lock is _lock:  # otherwise another thread has these, and waits
            _changes.by, _changes.count = self, _changes.count + 1


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore the states afterwards. No piece of another forward runs in between."""
    own = OwnStates()
    own.begin()
    try:
        yield
    finally:
        own.end()


@contextmanager
def every_generator_restored(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the states of the interpreter's generators, of torch's on the CPU, and of ``devices`` afterwards."""
    with generators_restored(), ExitStack() as scope:
        scope.enter_context(torch.random.fork_rng(devices=[]))
        for device in {device for device in devices if has_streams(device)}:
            scope.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
        yield


class Drawing:
    """Which pieces of forwards use random numbers, as far as it is known from earlier runs.

    Each piece has an owner, such as a block in training mode, and a kind, such as the sizes of the block's inputs. A
    piece that has used random numbers once may use them for inputs of any kind.

    Attributes:
        is_doubted: whether it is tried again which blocks use them, because generators have changed although no piece
            was known to use them. It may have been another thread, so only blocks that use them in each call are found.
    """

    def __init__(self) -> None:
        self._draws = set[Any]()
        self._quiet = set[tuple[Any, Any]]()
        self.is_doubted = False
        self._doubts = 3  # as many as there may still be
        self._tried: dict[Any, bool] = {}  # whether a block has used them in each of its calls

    def is_quiet(self, owner: Any, kind: Any, *, is_block: bool) -> bool:
        """Return whether a piece is known to use no random numbers."""
        return (owner, kind) in self._quiet and owner not in self._draws and not (self.is_doubted and is_block)

    def learn(self, owner: Any, kind: Any, *, draws: bool) -> None:
        if self.is_doubted and (owner, kind) in self._quiet:
            self._tried[owner] = draws and self._tried.get(owner, True)
            return
        if draws:
            self._draws.add(owner)
            return
        if len(self._quiet) >= _MOST:  # the sizes of inputs keep changing
            self._quiet.clear()
        self._quiet.add((owner, kind))

    def doubt(self, changed: Sequence[str]) -> bool:
        """End the forwards of a run in which ``changed`` generators were used unexpectedly.

        Returns:
            Whether blocks are tried again in the next run. If the generators change in that run too, and no block was
            found, the loss or another thread uses them.
        """
        was_doubted, self.is_doubted = self.is_doubted, False
        self._draws.update(owner for owner, always in self._tried.items() if always)
        self._tried.clear()
        if was_doubted and changed:
            self._doubts = 0
        if was_doubted or not changed or not self._doubts:
            return False
        self._doubts -= 1
        self.is_doubted = True
        return True


class Numbers:
    """The random numbers that pieces of forwards take from generators of the interpreter, in one run.

    A piece is a call of a block, or the part between two calls. Stages run at the same time, so the order in which they
    take random numbers would depend on timing. Therefore the generators have a separate state for each piece that uses
    them, and no two such pieces run at the same time. These states are derived from the states before the run, which
    then advance by one number.

    If the run is inside a piece of another pipe, this piece waits for the run, so the pieces of the run exclude only
    each other. Their states are derived from those of the outer piece.

    Args:
        drawing: which pieces use random numbers. A piece that is not known yet may use them.
        advanced: receives the names of the generators that advance.
    """

    def __init__(self, drawing: Drawing, advanced: set[str]) -> None:
        self._drawing = drawing
        self._is_nested = is_locked()
        self._lock = waiting.RLock() if self._is_nested else _lock
        self._seeds: dict[str, int] = {}
        self._advanced = advanced
        self._advances, self._before = _changes.advances, _observe()

    def own_states(self) -> tuple[object, waiting.RLock]:
        """Return what identifies the lock of the pieces, and the lock."""
        return self if self._is_nested else _GENERATORS, self._lock

    def begin(self, owner: Any, kind: Any, place: Sequence[int], *, is_block: bool) -> Callable[..., Sequence[str]]:
        """Begin a piece. Return a function that ends it, to be called on the same thread.

        That function returns the names of the generators that the piece has used.

        Args:
            owner, kind: the properties that determine whether the piece uses random numbers: see :class:`Drawing`.
            place: numbers that are unique to the piece in this run.
            is_block: whether the piece is a call of a block.
        """
        is_inside = self.own_states()[0] in locks_of_thread()  # for example, while the size of an output is computed
        if is_inside or self._drawing.is_quiet(owner, kind, is_block=is_block):
            return end_nothing
        piece = _Piece(self, owner, kind, place)
        piece.begin()
        return piece.finish

    def seed(self, states: dict[str, Any], place: Sequence[int]) -> None:
        """Give the generators the states of the piece at ``place``, in a run that begins with these ``states``."""
        if not self._seeds:
            self._seeds = {name: _next_seed(name, state) for name, state in states.items()}
        for name, seed in self._seeds.items():
            _seed(name, [seed, *place])

    def learn(self, owner: Any, kind: Any, drew: Sequence[str]) -> None:
        """Record which generators a piece has used, and let these advance."""
        for name in {*drew} - self._advanced:
            self._advanced.add(name)
            if not self._is_nested:
                _changes.advances += 1
            advance(name)
        if drew or sys.exc_info()[0] is None:  # a piece that failed may not have reached its first number
            self._drawing.learn(owner, kind, draws=bool(drew))

    def end_forwards(self) -> Sequence[str]:
        """Return the generators that a piece has used in this run although it was known to use none.

        They cannot be told from those that another thread uses, and are found only if no other run is active.
        """
        now, changed = _observe(), list[str]()
        if self._before and now and _changes.advances - self._advances == len(self._advanced):
            advanced = {name: _next_state(name, self._before[name]) for name in self._advanced & self._before.keys()}
            changed = find_changed_generators({**self._before, **advanced}, now)
        return changed if self._drawing.doubt(changed) else ()


class _Piece(OwnStates):
    """A piece of a forward that may use random numbers."""

    def __init__(self, numbers: Numbers, owner: Any, kind: Any, place: Sequence[int]) -> None:
        super().__init__(*numbers.own_states())
        self._numbers, self._place = numbers, place
        self._learn = partial(numbers.learn, owner, kind)

    def begin(self) -> None:
        super().begin()
        try:
            self._numbers.seed(self._before, self._place)
            self._first = generator_states()
        except BaseException:
            self.end()
            raise

    def finish(self, *, counts: bool = True) -> list[str]:
        """End the piece. If it ``counts``, record which generators it has used, and let these advance."""
        return self.end(self._learn if counts else None)


_MOST = 1 << 14


def end_nothing(*, counts: bool = True) -> Sequence[str]:
    return ()


def _copy(name: str, state: Any) -> Any:
    """Return a generator in this ``state``."""
    if name == _PYTHON:
        generator = random.Random()
        generator.setstate(state)
    else:
        generator = sys.modules["numpy"].random.RandomState()
        generator.set_state(state)
    return generator


def _take(name: str, generator: Any) -> int:
    """Return the next number of a generator, which a run takes from it."""
    return int(generator.getrandbits(32) if name == _PYTHON else generator.randint(2**32, dtype="uint32"))


def _next_seed(name: str, state: Any) -> int:
    """Return the number that a run takes from a generator in this ``state``."""
    return _take(name, _copy(name, state))


def _next_state(name: str, state: Any) -> Any:
    """Return the ``state`` of a generator after a run has taken a number from it."""
    generator = _copy(name, state)
    _take(name, generator)
    return generator.getstate() if name == _PYTHON else generator.get_state(legacy=False)


def advance(name: str) -> None:
    """Advance a generator as a run does in which a piece uses it."""
    _take(name, random if name == _PYTHON else sys.modules["numpy"].random)


def _seed(name: str, numbers: Sequence[int]) -> None:
    if name == _PYTHON:
        random.seed(sum(number << 32 * k for k, number in enumerate(numbers)))
    else:
        sys.modules["numpy"].random.seed(numbers)
