"""Defer signal handlers while ranks exchange messages, so that an interrupt cannot leave ranks in different calls.

A signal handler may raise an error: Python's handler of SIGINT raises KeyboardInterrupt, and a handler of SIGTERM may
raise SystemExit. In the middle of an exchange of messages, such an error would end the call on one rank only. It is
raised where it can be reported to the other ranks instead, or at the end of the call, which then succeeds on all ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGBREAK")
_SIGNALS: Final = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]

# Its functions in C: Python's wrappers convert each result to an enum, which takes longer than all the rest.
_signal: Any = getattr(signal, "_signal", signal)

_active: _Deferral | None = None


class _Deferral:
    """The signal handlers that are deferred on the main thread.

    Attributes:
        thread: the identifier of the main thread.
        allows: whether handlers run at once.
        pending: the signals whose handlers have not run yet.
    """

    def __init__(self) -> None:
        self.thread = get_ident()
        self.allows = False
        self.pending: list[int] = []
        self._handlers: dict[int, Callable[[int, Any], Any]] = {}

    def install(self) -> bool:
        """Replace the handlers. Return False if there are none, or on another thread, where they never run."""
        for number in _SIGNALS:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                try:
                    _signal.signal(number, self.handle)
                except ValueError:  # not the main thread
                    return False
        return bool(self._handlers)

    def remove(self) -> None:
        """Restore the handlers, except those that the program has replaced in the meantime."""
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self.handle:
                _signal.signal(number, handler)

    def handle(self, number: int, frame: Any) -> None:
        """Run the handler of a signal, or defer it. A second signal of the same kind is not deferred."""
        if not self.allows and number not in self.pending:
            self.pending.append(number)
            return
        if number in self.pending:
            self.pending.remove(number)
        before, self.allows = self.allows, False  # if the handler raises, the error is reported before any other
        self._handlers[number](number, frame)
        self.allows = before

    def allow(self) -> None:
        """Run pending handlers, and let handlers run at once."""
        self.allows = True
        while self.pending:
            self.handle(self.pending[0], None)


class hold_signals:  # noqa: N801 — used like a function
    """Defer signal handlers in a part of a block of :func:`allow_signals`, to its end."""

    def __enter__(self) -> None:
        self._deferral = _current()
        if self._deferral is not None:
            self._allows, self._deferral.allows = self._deferral.allows, False

    def __exit__(self, *_: object) -> None:
        if self._deferral is not None and self._allows:
            self._deferral.allow()


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer signal handlers to the next :func:`allow_signals`, or else to the end of the outermost such block."""
    global _active
    if _current() is not None:
        with hold_signals():
            yield
        return
    deferral = _Deferral()
    if not deferral.install():
        yield
        return
    _active = deferral
    try:
        yield
    finally:
        _active = None
        deferral.remove()
        _raise_signals(deferral.pending)


class allow_signals:  # noqa: N801
    """Run pending signal handlers, and let handlers run in a block whose errors are reported to the other ranks.

    It is the last context of the ``with`` statement of that report. In any code between them, such as that of
    ``contextlib``, a handler could raise its error while the block is left, and the report would not be sent.
    """

    def __enter__(self) -> None:
        self._deferral = _current()
        if self._deferral is not None:
            self._deferral.allow()

    def __exit__(self, *_: object) -> None:
        if self._deferral is not None:
            self._deferral.allows = False


def _current() -> _Deferral | None:
    return _active if _active is not None and _active.thread == get_ident() else None


def _raise_signals(numbers: Sequence[int]) -> None:
    if numbers:
        try:
            signal.raise_signal(numbers[0])
        finally:
            _raise_signals(numbers[1:])
