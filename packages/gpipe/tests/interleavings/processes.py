"""Fork the process, or end it, at each place of a step where a signal may arrive.

    python -m packages.gpipe.tests.interleavings.processes [--every 10]

- ``exit``: the thread that runs the step raises SystemExit, and the interpreter ends. The status must be the given one,
  with nothing on stderr.
- ``fork``: the thread that runs the step forks. In the child, an exception leaves the step, and the next step of the
  same pipe must be right. The parent continues its step.
- ``fork elsewhere``: a different thread forks, and trains a pipe of its own in the child. It needs the locks of the
  process, which the parent's threads may have held.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import NoReturn

from packages.streams.tests.fakes import end_after, in_child
from packages.streams.tests.interleavings.interrupts import Interrupts, Place, representatives

from ..layers import started, within
from ..test_interrupts import FILES, Trial
from .interrupted import TRIALS, Options, named, prepared, show

STATUS = 7
PATIENCE = 60
"""Seconds after which a child counts as hanging."""
WAITS = 1
"""Seconds that a step waits for the fork of a different thread, and its child."""


class LeftError(Exception):
    """Raised in a child to leave the step that its parent was in."""


def exits(trial: Callable[[], Trial], at: int) -> str:
    """End a new process at place ``at`` of a step, and return what is wrong with its end."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            end_after(PATIENCE)
            os.dup2(output.fileno(), 2)
            step = trial().step
            Interrupts(FILES, at, act=lambda: sys.exit(STATUS)).during(step)
            os._exit(STATUS)  # the step has fewer places than the one that was counted
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output.seek(0)
        text = output.read().decode(errors="replace")
    return "" if status == STATUS and not text else f"status {status}: {text.strip() or 'no output'}"


def forks(trial: Callable[[], Trial], at: int) -> str:
    """Fork this process at place ``at`` of a step, and return what is wrong in the child or the parent."""
    own = trial()
    children: list[int] = []
    reader, writer = os.pipe()

    def act() -> None:
        child = os.fork()
        if not child:
            end_after(PATIENCE)
            raise LeftError
        children.append(child)
        os.waitpid(child, 0)

    try:
        Interrupts(FILES, at, act=act).during(own.step)
    except LeftError:
        answered(writer, own)
    os.close(writer)
    with os.fdopen(reader) as answer:
        told = answer.read()
    within(10, own.expect_all_well)
    within(10, own.pipe.close)
    return "" if not children or told == "right" else told or "the child hung, or died"


def answered(writer: int, trial: Trial) -> NoReturn:
    """Write whether the next step and the close of a forked child are right, and end the child."""
    try:
        within(2, trial.expect_all_well)
        within(2, trial.pipe.close)
        os.write(writer, b"right")
    except BaseException:
        os.write(writer, traceback.format_exc().encode())
    finally:
        os._exit(0)


def forks_elsewhere(trial: Callable[[], Trial], at: int) -> str:
    """Fork this process in a different thread while a step is at place ``at``; return what is wrong."""
    own = trial()
    forked: list[Future[str]] = []

    def child() -> None:
        new = trial()
        new.expect_right_step()  # the process still has the claim of the parent's step
        new.pipe.close()

    def act() -> None:
        forked.append(started(lambda: in_child(child)))
        # At some places, this thread holds a lock for which the fork waits. Then the fork happens a bit later.
        wait(forked, WAITS)

    Interrupts(FILES, at, act=act).during(own.step)
    answers = [each.result(10 * PATIENCE) for each in forked]
    within(10, own.expect_all_well)
    within(10, own.pipe.close)
    return "" if answers in ([], ["None"]) else answers[0]


WAYS = {"exit": exits, "fork": forks, "fork elsewhere": forks_elsewhere}


def failures(
    what: Callable[[Callable[[], Trial], int], str], options: Options, every: int
) -> Iterator[tuple[Place | None, str]]:
    """Yield each place with what is wrong there; None and "" if nothing is."""
    places = Interrupts(FILES)
    counted = prepared(options)
    places.during(counted.step)
    counted.pipe.close()  # a fork has no threads then
    gc.freeze()  # without it, two thirds of an interpreter's end are a collection of all that torch has imported
    try:
        for at in representatives(places.places)[::every]:
            wrong = what(lambda: prepared(options), at)
            yield (places.places[at - 1], wrong) if wrong else (None, "")
    finally:
        gc.unfreeze()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="processes")
    parser.add_argument("--every", type=int, default=10, help="act only at every n-th place")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    failed = False
    print(f"{'step':<36} {'places':>10} {'failed':>7} {'seconds':>8}")
    for name, what in WAYS.items():
        for trial in TRIALS:
            begin = time.monotonic()
            failed |= show(f"{name}: {named(trial)}", [*failures(what, trial, options.every)], begin)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
