"""Wait until workers have freed what they made, on a Python that counts references by thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gpipe import GPipe
from gpipe.engine._sweep import FREE_THREADED, Sweep

_begun: list[threading.Event] = []


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sweeps that begin in the test are noted, for :func:`swept`."""

    class Noted(Sweep):
        def __init__(self, in_queues: Any) -> None:
            super().__init__(in_queues)
            _begun.append(self.done)

    monkeypatch.setattr("gpipe.engine._workers.Sweep", Noted)
    yield
    _begun.clear()


def swept() -> None:
    """The sweeps that have begun are done; elsewhere there are none."""
    assert FREE_THREADED or not _begun
    assert all(done.wait(300) for done in _begun)


def awake(pipe: GPipe) -> None:
    """The workers of ``pipe`` have been awake, as by other runs, and freed what they made and nobody holds.

    Several times, since what a worker frees may hold what this thread made, and that a run.
    """
    for _ in range(3 * FREE_THREADED):
        pipe._workers.sweep()
        swept()
