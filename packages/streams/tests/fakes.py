"""Stand-ins, and waits that cannot last for ever."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 30.0
"""Seconds after which something that should have happened counts as hanging."""


class FakeDevice:
    """A device of its own, different from every other."""

    type = "fake"
    index = None


def take(queue: SimpleQueue[Any]) -> Any:
    """The next thing in ``queue``; ``queue.Empty`` instead of a hang."""
    return queue.get(timeout=PATIENCE)


def wait(event: Event) -> None:
    """Return when ``event`` is set; fail instead of a hang."""
    assert event.wait(PATIENCE), "this never happened"


def in_thread(call: Callable[[], T]) -> T:
    """What ``call`` gives, or raises, on a fresh thread."""
    answers: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    thread = Thread(target=run, daemon=True)
    thread.start()
    result, error = take(answers)
    thread.join(PATIENCE)
    if error is not None:
        raise error
    return result
