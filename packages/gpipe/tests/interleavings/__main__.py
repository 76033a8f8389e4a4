"""Explore the scenarios, and print a table, with the command that repeats each failure.

    python -m packages.gpipe.tests.interleavings [names] [--most 2000] [--preemptions 2]
    python -m packages.gpipe.tests.interleavings 1f1b --repeat 0,0,1
    python -m packages.gpipe.tests.interleavings 1f1b --runs 1000 --depth 3

Each scenario is explored twice: without injected events, and then with one failure or interrupt. Large ones, and all
scenarios with ``--runs``, get random priorities instead of all choices.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence

from packages.streams.tests.interleavings.explore import Explored, explore, repeat, sample

from .catalogue import LARGE, ORDERS_ONLY, PROGRAMS
from .scenarios import INJECTS, fast, line


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    failed = False
    print(f"{'scenario':<28} {'what':<9} {'runs':>7} {'injected':>8} {'complete':>8} {'seconds':>8}")
    with fast():
        for name in options.names or PROGRAMS:
            if options.repeat is not None:
                injects = INJECTS if options.repeat.startswith("f") else ()
                repeat(PROGRAMS[name], [*map(int, options.repeat.lstrip("f").split(","))], injects=injects)
                continue
            for injections in (0,) if name in ORDERS_ONLY else (0, 1):
                begin = time.monotonic()
                found = explored(name, injections, options)
                show(name, injections, found, time.monotonic() - begin)
                failed |= bool(found.failures)
    return int(failed)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="interleavings")
    found.add_argument("names", nargs="*", help="scenarios; all by default")
    found.add_argument("--most", type=int, default=1000, help="the most runs of a scenario, with and without failures")
    found.add_argument("--preemptions", type=int, default=2)
    found.add_argument("--runs", type=int, default=0, help="random priorities instead of all choices")
    found.add_argument("--depth", type=int, default=3)
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--repeat", help="the choices of a run to repeat")
    return found


def explored(name: str, injections: int, options: argparse.Namespace) -> Explored:
    program, injects = PROGRAMS[name], INJECTS if injections else ()
    chosen = {"injections": injections, "injects": injects, "seed": options.seed}
    runs = options.runs or (options.most if name in LARGE else 0)
    if runs:
        return sample(program, runs=runs, depth=options.depth, **chosen)
    return explore(program, preemptions=options.preemptions, most=options.most, **chosen)


def show(name: str, injections: int, found: Explored, seconds: float) -> None:
    what = "failures" if injections else "orders"
    print(f"{name:<28} {what:<9} {found.runs:>7} {found.injected:>8} {found.complete:>8} {seconds:>8.1f}")
    for each in found.failures:
        assert each.error is not None
        print(f"  failed; repeat it with: {line(name, each, injections)}")
        print("".join(traceback.format_exception(each.error))[-6000:])
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
