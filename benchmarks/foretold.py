"""What `step` takes on workload W by each schedule, beside what `simulate` foretells from the stages' own costs.

The costs are those of the same actions walked inline, one after the other. So a foretelling knows the order of things,
and nothing of two threads on one machine: the quotient is divided by half of the machine's two-thread scaling, measured
in the same rounds. Memory is given back to the system and faulted in again in every step, unless the C library is told
to keep it: with "kept" it is, for all that is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import gpipe
from gpipe.schedule import named
from gpipe.simulate import StageCost, simulate
from streams import keep_memory

from .contenders import LOOP, STAGES, TWO_LOOPS, Contender, Task
from .programs import build
from .report import Report, Table
from .timing import interleaved, ratios, spread

CHUNKS = 8
SCHEDULES = ("fill_drain", "1f1b", "zero_bubble")
HEADINGS = ("D=B", "memory", "schedule", "foretold", "measured", "two threads", "measured / two threads", "quotient")
Found = dict[str, Any]


def run(options: argparse.Namespace) -> Iterator[Report]:
    table = Table(
        "pipeline.md",
        "foretold",
        f"`step` on W, m={CHUNKS}, two stages: speed-ups over the plain loop, foretold by `simulate` and measured. "
        "Medians, in brackets the quartiles",
        HEADINGS,
        left=3,
    )
    figures = {}
    for width in (64,) if options.quick else (1024, 256):
        for memory in ("given back", "kept"):
            rounds = 2 if options.quick else options.rounds or 12
            found = _in_a_process(width, rounds, memory)
            for schedule in SCHEDULES:
                cells, figure = _row(found, schedule)
                table.add(width, memory, schedule, *cells)
                where = f"foretold, W {width}, memory {memory}, {schedule}"
                figures.update({f"{where}: {name}": value for name, value in figure.items()})
    yield Report([table], figures)


def _row(found: Found, schedule: str) -> tuple[list[str], dict[str, float]]:
    measured = ratios(found["times"]["loop"], found["times"][schedule])
    foretold = median(found["times"]["loop"]) / found["foretold"][schedule]
    scaling = [2 * ratio for ratio in ratios(found["times"]["loop"], found["times"]["two loops"])]
    corrected = median(measured) / (median(scaling) / 2)
    quotient = corrected / foretold
    cells = [f"{foretold:.2f}", spread(measured), spread(scaling), f"{corrected:.2f}", f"{quotient:.2f}"]
    return cells, {"speed-up / scaling": corrected, "quotient": quotient}


def _in_a_process(width: int, rounds: int, memory: str) -> Found:
    """Of its own, since what the C library is told counts for the whole process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.foretold", str(width), str(rounds), memory],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        timeout=600,
        check=True,
    )
    found: Found = json.loads(done.stdout)
    return found


def _measure(width: int, rounds: int) -> Found:
    task = Task(f"W {width}", CHUNKS)
    contenders = {"loop": LOOP, "two loops": TWO_LOOPS, **{n: Contender("gpipe", schedule=n) for n in SCHEDULES}}
    programs = {name: build(contender, task).run for name, contender in contenders.items()}
    inline = {name: Inline(programs[name]) for name in SCHEDULES}
    times = interleaved(programs | {f"{name} inline": inline[name] for name in SCHEDULES}, rounds)
    return {"times": times, "foretold": {name: _foretold(name, inline[name].seen) for name in SCHEDULES}}


class Inline:
    """A step on this thread, which notes what every action takes."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self.seen: dict[tuple[int, str], list[float]] = defaultdict(list)

    def __call__(self) -> None:
        with gpipe.inline(), gpipe.record() as timeline:
            self._step()
        for event in timeline.events:
            self.seen[event.stage, event.kind].append(event.seconds)


def _foretold(schedule: str, seen: dict[tuple[int, str], list[float]]) -> float:
    """Seconds of a step whose every action takes its median."""

    def cost(stage: int) -> StageCost:
        kinds = ("forward", "backward", "backward_input", "backward_weight")
        given = {kind: median(seen[stage, kind]) for kind in kinds if seen[stage, kind]}
        whole = sum(seconds for kind, seconds in given.items() if kind != "forward")
        return StageCost(**{"backward": whole, **given})

    program = named(schedule, CHUNKS, tuple(range(STAGES)), 0)
    return simulate(program, [cost(stage) for stage in range(STAGES)]).makespan


if __name__ == "__main__":
    if sys.argv[3] == "kept":
        keep_memory()
    print(json.dumps(_measure(int(sys.argv[1]), int(sys.argv[2]))))
