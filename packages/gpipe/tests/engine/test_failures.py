"""Failures of several workers at once."""

from __future__ import annotations

import threading

from gpipe.engine._failures import Failures
from gpipe.schedule import Action, Step, fill_drain

STEP = Step(0, Action("forward", 0))


def test_a_stop_in_the_middle_of_a_failure_holds():
    """Whichever comes last, nothing is done any more; and a stop waits until a failure has been added."""
    failures = Failures()
    failures.walk = fill_drain(1, 1).on((0,))
    begun = threading.Event()

    def stop() -> None:
        begun.set()
        failures.stop()

    thread = threading.Thread(target=stop, daemon=True)
    with failures._lock:
        thread.start()
        assert begun.wait(300)
        assert failures.earliest is None  # it comes later
    thread.join(300)
    failures.add(STEP, ArithmeticError())
    assert failures.earliest == (float("-inf"), 0)
