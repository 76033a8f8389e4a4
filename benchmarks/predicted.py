"""What `step` takes on workload W by each schedule, beside what `simulate` predicts from the stages' own costs.

The costs are those of the same actions walked inline, one after the other, on as many threads as a worker has; the
optimizer's step is added to the prediction. So a prediction knows the order of things, and nothing of two threads on
one machine: the quotient is divided by half of the machine's two-thread scaling, measured in the same rounds. Memory
is given back to the system and faulted in again in every step, unless `streams.keep_memory()` tells the C library to
keep it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

from gpipe.schedule import named
from gpipe.simulate import StageCost, simulate

from .contenders import LOOP, STAGES, TWO_LOOPS, Contender, Task
from .machine import allocator
from .match import Match, Outcomes, Rules
from .programs import Costs
from .report import Report, Table
from .timing import ratios, spread

CHUNKS = 8
SCHEDULES = ("fill_drain", "1f1b", "zero_bubble")
HEADINGS = (
    "D=B",
    "allocator",
    "schedule",
    "predicted",
    "measured",
    "page faults",
    "two threads",
    "measured / two threads",
    "quotient",
)


def run(options: argparse.Namespace) -> Iterator[Report]:
    """One table: each width with memory given back and kept."""
    rounds = options.rounds or (2 if options.quick else 12)
    caption = (
        f"`step` on W, m={CHUNKS}, two stages, {rounds} rounds: speed-ups over the plain loop, predicted by `simulate` "
        f"and measured. Medians, in brackets the quartiles; allocator: {allocator()}"
    )
    table = Table("pipeline.md", "predicted", caption, HEADINGS, left=3)
    figures = {}
    for width in (64,) if options.quick else (1024, 256):
        for keep_memory in (False, True):
            found = _measured(Task(f"W {width}", CHUNKS), keep_memory, rounds)
            for schedule, (ours, cells, own) in found.items():
                table.add(width, ours.allocator, schedule, *cells)
                where = f"predicted, W {width}, {'memory kept' if keep_memory else 'memory given back'}, {schedule}"
                figures.update({f"{where}: {name}": value for name, value in own.items()})
    yield Report([table], figures)


Row = tuple[Contender, list[str], dict[str, float]]


def _measured(task: Task, keep_memory: bool, rounds: int) -> dict[str, Row]:
    loop, two_loops = (replace(one, keep_memory=keep_memory) for one in (LOOP, TWO_LOOPS))
    ours = {name: Contender("gpipe", schedule=name, keep_memory=keep_memory) for name in SCHEDULES}
    inline = {name: replace(one, library="inline") for name, one in ours.items()}
    field = [loop, two_loops, *ours.values(), *inline.values()]
    with Match(Rules(rounds=rounds)) as match:
        outcomes = match.play(task, field, lambda contender: True)
        if failures := [f"{one.name}: {outcome.failure}" for one, outcome in outcomes.items() if outcome.failure]:
            raise RuntimeError("; ".join(failures))
        predicted = {name: _predicted(name, match.ask(one, "costs")) for name, one in inline.items()}
    return {name: (one, *_row(outcomes, loop, two_loops, one, predicted[name])) for name, one in ours.items()}


def _row(
    outcomes: Outcomes, loop: Contender, two_loops: Contender, ours: Contender, predicted: float
) -> tuple[list[str], dict[str, float]]:
    seconds = outcomes[loop].seconds
    measured = ratios(seconds, outcomes[ours].seconds)
    scaling = [2 * ratio for ratio in ratios(seconds, outcomes[two_loops].seconds)]
    corrected = median(measured) / (median(scaling) / 2)
    quotient = corrected / (median(seconds) / predicted)
    cells = [
        f"{median(seconds) / predicted:.2f}",
        spread(measured),
        f"{median(outcomes[ours].faults):.0f}",
        spread(scaling),
        f"{corrected:.2f}",
        f"{quotient:.2f}",
    ]
    return cells, {"speed-up": median(measured), "speed-up / scaling": corrected, "quotient": quotient}


def _predicted(schedule: str, costs: Costs) -> float:
    """Seconds of a step whose every action takes its median, and of the optimizer."""
    actions, optimizer = costs

    def cost(stage: int) -> StageCost:
        kinds = ("forward", "backward", "backward_input", "backward_weight")
        given = {kind: actions[stage, kind] for kind in kinds if (stage, kind) in actions}
        whole = sum(seconds for kind, seconds in given.items() if kind != "forward")
        return StageCost(**{"backward": whole, **given})

    program = named(schedule, CHUNKS, tuple(range(STAGES)), 0)
    return simulate(program, [cost(stage) for stage in range(STAGES)]).makespan + optimizer
