"""KeyboardInterrupt at each place of a step where a signal may arrive; the next step runs on a different thread.

    python -m packages.gpipe.tests.interleavings.interrupted [--every 3]

A lock that an interrupt leaves locked is reentrant for its thread, and so the next step of the same thread would pass.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

from packages.streams.tests.interleavings.interrupts import Interrupts, Place, representatives

from ..layers import within
from ..test_interrupts import FILES, Trial

TRIALS = (
    ("1f1b", "never", True),
    ("1f1b", "never", False),
    (None, "always", False),
    ("zero_bubble", "except_last", False),
    ("counted", "always", False),
    ("evaluate", "never", False),
)


def failures(way: str | None, mode: str, inline: bool, every: int) -> Iterator[tuple[Place | None, Exception | None]]:
    """For each interrupt, None or the error of the next step, with the place."""
    trial = prepared(way, mode, inline)
    places = Interrupts(FILES)
    places.during(trial.step)
    for at in representatives(places.places)[::every]:
        if not Interrupts(FILES, at).during(trial.step):
            continue  # a step may take fewer lines later, after it has seen what layers do
        try:
            within(10, trial.expect_all_well)
        except Exception as error:
            yield places.places[at - 1], error
            trial = prepared(way, mode, inline)
        else:
            yield None, None


def prepared(way: str | None, mode: str, inline: bool) -> Trial:
    trial = Trial(way, mode, inline)
    trial.step()
    trial.step()
    return trial


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="interrupted")
    parser.add_argument("--every", type=int, default=3, help="only one in so many places")
    every = parser.parse_args(arguments).every
    failed = False
    print(f"{'step':<36} {'interrupts':>10} {'failed':>7} {'seconds':>8}")
    for way, mode, inline in TRIALS:
        begin = time.monotonic()
        found = [*failures(way, mode, inline, every)]
        wrong = [(place, error) for place, error in found if place is not None]
        name = f"{way or 'call'} {mode} {'inline' if inline else 'threads'}"
        print(f"{name:<36} {len(found):>10} {len(wrong):>7} {time.monotonic() - begin:>8.1f}", flush=True)
        for place, error in wrong:
            assert place is not None
            print(f"  {place[0].co_filename}, {place[0].co_qualname}, instruction {place[1]}: {error!r}")
        failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
