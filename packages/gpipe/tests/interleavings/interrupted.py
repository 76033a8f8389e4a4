"""Raise KeyboardInterrupt at each place of a step where a signal may arrive.

    python -m packages.gpipe.tests.interleavings.interrupted [--every 3] [--twice 30]

The next step runs on a different thread. If an interrupt leaves a reentrant lock locked, a next step on the same thread
would succeed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence

from packages.streams.tests.interleavings.interrupts import Interrupts, Place, representatives

from ..layers import within
from ..test_interrupts import FILES, Trial

Options = tuple[str | None, str, bool, bool, bool]
TRIALS: tuple[Options, ...] = (
    ("1f1b", "never", True, False, False),
    ("1f1b", "never", False, False, False),
    ("1f1b", "never", False, False, True),
    (None, "always", False, False, False),
    ("zero_bubble", "except_last", False, False, False),
    ("counted", "always", False, False, False),
    ("evaluate", "never", False, False, False),
    (None, "always", False, True, False),
    (None, "never", True, True, True),
    ("1f1b", "never", False, True, False),
)
"""The arguments of :class:`Trial`."""


def failures(options: Options, every: int) -> Iterator[tuple[Place | None, Exception | None]]:
    """Yield the place of each interrupt and the error of the next step; None for both if it succeeds."""
    trial = prepared(options)
    places = Interrupts(FILES)
    places.during(trial.step)
    for at in representatives(places.places)[::every]:
        interrupts = Interrupts(FILES, at)
        if not interrupts.during(trial.step):
            continue  # later steps may run fewer lines, because the properties of the layers are known
        try:
            trial.expect_nothing_left()
            within(10, trial.expect_all_well)
            interrupts.error = None
            trial.expect_nothing_left()  # the frames are freed, which ends generators late
        except Exception as error:
            yield interrupts.interrupts[0], error
            trial = prepared(options)
        else:
            yield None, None


def failures_twice(options: Options, every: int) -> Iterator[tuple[Place | None, str]]:
    """Do the same with a second interrupt, at a random place while the first one is handled."""
    rng = random.Random(0)
    trial = prepared(options)
    places = Interrupts(FILES)
    places.during(trial.step)
    for at in representatives(places.places)[::every]:
        once = Interrupts(FILES, at)
        once.during(trial.step)
        within(10, trial.expect_all_well)
        numbers = representatives(once.places)
        if not numbers:
            continue
        then = rng.choice(numbers)
        twice = Interrupts(FILES, at, then)
        twice.during(trial.step)
        try:
            within(10, trial.expect_all_well)
        except Exception as error:
            first, *second = twice.interrupts or [places.places[at - 1]]
            yield first, f"then {', '.join(map(described, second))}: {error!r}"
            trial = prepared(options)
        else:
            if len(twice.interrupts) == 2:
                yield None, ""


def named(options: Options) -> str:
    way, mode, inline, blocks, tied = options
    words = [way or "call", mode, "inline" if inline else "threads", "model" * blocks, "tied" * tied]
    return " ".join(filter(None, words))


def described(place: Place) -> str:
    code, instruction = place
    return f"{code.co_filename}, {code.co_qualname}, instruction {instruction}"


def prepared(options: Options) -> Trial:
    trial = Trial(*options)
    trial.step()
    trial.step()
    return trial


def show(name: str, found: Sequence[tuple[Place | None, object]], begin: float) -> bool:
    wrong = [(place, error) for place, error in found if place is not None]
    print(f"{name:<36} {len(found):>10} {len(wrong):>7} {time.monotonic() - begin:>8.1f}", flush=True)
    for place, error in wrong:
        print(f"  {described(place)}: {error!r}")
    return bool(wrong)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="interrupted")
    parser.add_argument("--every", type=int, default=3, help="interrupt only at every n-th place")
    parser.add_argument("--twice", type=int, default=20, help="a second interrupt at every n-th place; 0 for none")
    options = parser.parse_args(arguments)
    failed = False
    print(f"{'step':<36} {'interrupts':>10} {'failed':>7} {'seconds':>8}")
    for trial in TRIALS:
        begin = time.monotonic()
        failed |= show(named(trial), [*failures(trial, options.every)] if options.every else [], begin)
        begin = time.monotonic()
        if options.twice:
            failed |= show(f"{named(trial)} twice", [*failures_twice(trial, options.twice)], begin)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
