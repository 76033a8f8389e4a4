"""Explore the scenarios, print a table, and for each failure the command that repeats it.

python -m packages.gpipe.tests.interleavings [names] [--most 2000] [--preemptions 2] [--injects fail,interrupt]
python -m packages.gpipe.tests.interleavings 1f1b --repeat 0,0,1
python -m packages.gpipe.tests.interleavings 1f1b --runs 1000 --depth 3
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from packages.streams.tests.interleavings.explore import Explored, explore, repeat, sample

from .catalogue import PROGRAMS
from .scenarios import fast, line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="interleavings")
    parser.add_argument("names", nargs="*", help="scenarios; all by default")
    parser.add_argument("--most", type=int, default=1000, help="the most runs of a scenario")
    parser.add_argument("--preemptions", type=int, default=2)
    parser.add_argument("--injections", type=int, default=1)
    parser.add_argument("--injects", default="fail,interrupt", help="kinds of failures to inject")
    parser.add_argument("--lines", default="", help="files of which each line is a step")
    parser.add_argument("--runs", type=int, default=0, help="random priorities instead of all choices")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", help="the choices of a run to repeat")
    options = parser.parse_args(arguments)
    injects = [each for each in options.injects.split(",") if each]
    shared: dict[str, Any] = {"injects": injects, "lines": [each for each in options.lines.split(",") if each]}
    failed = False
    print(f"{'scenario':<28} {'runs':>7} {'injected':>8} {'complete':>8} {'seconds':>8}")
    with fast():
        for name in options.names or PROGRAMS:
            program, begin = PROGRAMS[name], time.monotonic()
            if options.repeat is not None:
                repeat(program, [*map(int, options.repeat.split(","))], **shared)
                continue
            injections = options.injections if injects else 0
            if options.runs:
                found = sample(
                    program, runs=options.runs, depth=options.depth, injections=injections, seed=options.seed, **shared
                )
            else:
                found = explore(
                    program,
                    preemptions=options.preemptions,
                    injections=injections,
                    most=options.most,
                    seed=options.seed,
                    **shared,
                )
            print(
                f"{name:<28} {found.runs:>7} {found.injected:>8} {found.complete:>8} {time.monotonic() - begin:>8.1f}"
            )
            failed |= bool(found.failures)
            report(name, found)
            sys.stdout.flush()
    return int(failed)


def report(name: str, found: Explored) -> None:
    for each in found.failures:
        assert each.error is not None
        print(f"  failed; repeat it with: {line(name, each)}")
        print("".join(traceback.format_exception(each.error))[-6000:])


if __name__ == "__main__":
    sys.exit(main())
