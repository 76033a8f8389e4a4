"""Predictions compared with measurements.

Steps of each schedule are compared with the prediction of `simulate`. Its costs are measured by running the same
actions inline, one at a time, on as many threads as a worker has; the optimizer's step is added. The prediction knows
the order of actions, but not that two threads share a machine, so the ratio is divided by half of the machine's
two-thread scaling, measured in the same rounds. Memory is returned to the system and faulted in again in every step,
unless the C library is configured to keep it (`mallopt`).

Plans: each model is planned for two CPU stages, with and without calibration, and with a loss computed once on the
full batch. Then it is built, and `Plan.verify` trains it for a few steps. True bytes include all storages that a stage
allocates, with parameters and buffers. The plan's choice is also compared with the fastest of all balances, numbers of
chunks and schedules.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import torch

import gpipe
from gpipe import GPipe
from gpipe._plan._candidate import SearchSpace
from gpipe._plan._costs import Measured
from gpipe._plan._search import search
from gpipe.schedule import named
from gpipe.simulate import Link, StageCost, simulate
from profiler import LayerProfile, Profile

from .contenders import LOOP, STAGES, TWO_LOOPS, Contender, Task
from .large_model import large
from .match import Match, Outcomes, Rules
from .measure import allocator, interleaved, ratios, spread
from .programs import Costs
from .report import Report, Table
from .workloads import CASES, SMALL_CASES, Case

CHUNKS = 8
SCHEDULES = ("fill_drain", "1f1b", "zero_bubble")
MEAN: dict[str, Any] = {"reduction": "mean"}
"""The declared reduction of all cases."""

ONCE: dict[str, Any] = {"reduction": None}
"""An undeclared reduction: the loss is computed once, on the full batch."""

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


def of_schedules(options: argparse.Namespace) -> Iterator[Report]:
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
            found = _steps(Task(f"W {width}", CHUNKS), keep_memory, rounds)
            for schedule, (ours, cells, own) in found.items():
                table.add(width, ours.allocator, schedule, *cells)
                where = f"predicted, W {width}, {'memory kept' if keep_memory else 'memory given back'}, {schedule}"
                figures.update({f"{where}: {name}": value for name, value in own.items()})
    yield Report([table], figures)


Row = tuple[Contender, list[str], dict[str, float]]


def _steps(task: Task, keep_memory: bool, rounds: int) -> dict[str, Row]:
    loop, two_loops = (replace(one, keep_memory=keep_memory) for one in (LOOP, TWO_LOOPS))
    ours = {name: Contender("gpipe", schedule=name, keep_memory=keep_memory) for name in SCHEDULES}
    inline = {name: replace(one, library="inline") for name, one in ours.items()}
    field = [loop, two_loops, *ours.values(), *inline.values()]
    with Match(Rules(rounds=rounds)) as match:
        outcomes = match.play(task, field, lambda contender: True)
        if failures := [f"{one.name}: {outcome.failure}" for one, outcome in outcomes.items() if outcome.failure]:
            raise RuntimeError("; ".join(failures))
        predicted = {name: _makespan(name, match.ask(one, "costs")[0]) for name, one in inline.items()}
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


def _makespan(schedule: str, costs: Costs) -> float:
    """Seconds of a step whose every action takes its median, and of the optimizer."""
    actions, optimizer = costs

    def cost(stage: int) -> StageCost:
        kinds = ("forward", "backward", "backward_input", "backward_weight")
        given = {kind: actions[stage, kind] for kind in kinds if (stage, kind) in actions}
        whole = sum(seconds for kind, seconds in given.items() if kind != "forward")
        return StageCost(**{"backward": whole, **given})

    program = named(schedule, CHUNKS, tuple(range(STAGES)), 0)
    return simulate(program, [cost(stage) for stage in range(STAGES)]).makespan + optimizer


def of_plans(options: argparse.Namespace) -> Iterator[Report]:
    """Yield predictions by model, the choice against all alternatives, search times, and a large plan's cost."""
    yield _predictions(options.quick)
    yield _against_every_way(options.quick)
    yield _searches(options.quick)
    yield large(options.quick)


def _predictions(quick: bool) -> Report:
    caption = "Two CPU stages: seconds of a step and bytes of each device, predicted / measured"
    headings = ("model", "calibrated", "plan", "low – high", "measured", "step", "device 0", "device 1")
    table = Table("plan.md", "plans", caption, headings, left=3)
    found: dict[str, list[float]] = {}
    inside: dict[str, list[bool]] = {}
    for name in ["LSTM tagger"] if quick else CASES:
        for given in ({}, {"schedule": "fill_drain", "checkpoint": "always"}, ONCE):
            for calibrate in (False, True):
                shown = _verified(name, calibrate, given)
                if shown is None:
                    continue
                plan, verified = shown
                loss = ", one loss" if plan.whole_loss else ""
                how = f"{plan.schedule}, m={plan.chunks}, {plan.balance}, {'/'.join(plan.checkpoint)}{loss}"
                quotients = [verified.ratio, *verified.byte_ratios]
                seconds = f"{verified.seconds * 1e3:.1f} ms"
                low, high = plan.predicted.seconds.low, plan.predicted.seconds.high
                expected = f"{low * 1e3:.1f} – {high * 1e3:.1f} ms"
                shown_quotients = [f"{ratio:.2f}" for ratio in quotients]
                table.add(name, "yes" if calibrate else "no", how, expected, seconds, *shown_quotients)
                calibrated = "calibrated" if calibrate else "not calibrated"
                found.setdefault(f"step, {calibrated}", []).append(quotients[0])
                found.setdefault("bytes", []).extend(quotients[1:])
                inside.setdefault(calibrated, []).append(low <= verified.seconds <= high)
    figures = {f"plan, step, {what}: share from low to high": mean(hits) for what, hits in inside.items()}
    figures |= {f"plan, {what}: median error": median(abs(x - 1) for x in them) for what, them in found.items()}
    figures |= {f"plan, {what}: largest error": max(abs(x - 1) for x in them) for what, them in found.items()}
    return Report([table], figures)


def _verified(name: str, calibrate: bool, given: dict[str, Any]) -> tuple[Any, Any] | None:
    torch.manual_seed(0)
    case = CASES[name]()
    # A function around torch's loss is not recognized: without reduction= it is computed once.
    loss = {"loss_fn": lambda output, target: case.loss(output, target), **MEAN, **given}
    plan = gpipe.plan(case.model, case.x, ["cpu"] * 2, target=case.y, calibrate=calibrate, **loss)
    pipe = plan.build(case.model)
    try:
        return plan, plan.verify(case.x, case.y)
    finally:
        pipe.close()


def _searches(quick: bool) -> Report:
    caption = "Seconds of a search: made-up layers, all schedules, any stages may recompute, twelve numbers of chunks"
    table = Table("plan.md", "search", caption, ("layers", "stages", "memory", "seconds", "ways that fit"), left=0)
    figures = {}
    for layers, stages in [(24, 4)] if quick else [(48, 8), (200, 16), (200, 64)]:
        for share in (None, 0.6):
            seconds, ways = _searched(layers, stages, share)
            memory = "any" if share is None else f"{share:.0%} of what the fastest takes"
            table.add(layers, stages, memory, f"{seconds:.2f}", ways)
            figures[f"plan, search n={layers} k={stages}, memory {memory}: seconds"] = seconds
    return Report([table], figures)


def _searched(layers: int, stages: int, share: float | None) -> tuple[float, int]:
    space = _space(layers, stages, None)
    if share is not None:
        space = _space(layers, stages, round(share * search([space])[0].fullest))
    begin = time.perf_counter()
    found = search([space])
    return time.perf_counter() - begin, len(found)


def _space(layers: int, stages: int, memory: int | None) -> SearchSpace:
    profile = _profile(layers)
    measured = Measured(
        profile,
        (2**20,) * layers,
        512,
        2**20,
        needs_gradient=False,
        separate_memory=False,
        placement=tuple(range(stages)),
        links=(Link(),) * stages,
    )
    chunks = [2**k for k in range(10)] + [48, 96]
    modes = ("never", "always")
    return SearchSpace(measured, sorted(chunks), ("1f1b", "zero_bubble", "fill_drain"), modes, (memory,) * stages)


def _profile(layers: int) -> Profile:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(layers, generator=generator).add(0.5).tolist()
    at = [
        Profile(tuple(_layer(k, weight, rows) for k, weight in enumerate(weights)), "cpu", "2", 1, 1, rows, 3)
        for rows in (1, 512)
    ]
    return Profile(at[1].layers, "cpu", "2", 1, 1, 512, 3, others=(at[0],))


def _layer(k: int, weight: float, rows: int) -> LayerProfile:
    seconds, size = weight * (1e-3 + 1e-4 * rows), round(weight * 2**16 * rows)
    return LayerProfile(
        str(k), "Linear", seconds, 2 * seconds, 2**20, 0, 0, size, 2**14 * rows, 2 * size, 0,
        backward_input_seconds=seconds,
    )  # fmt: skip


EVERY_CHUNKS = (2, 4, 8)
EVERY_SCHEDULE = ("1f1b", "fill_drain", "zero_bubble")
FEW, MANY = 3, 12
"""Rounds in which all take turns; rounds in which the fastest of those do, and again.

The luckiest of many is no measure. So the fastest is found in the one half of the later rounds, and both it and the
planned way are measured in the other half.
"""

FINALISTS = 5


class Way(NamedTuple):
    """A way to train."""

    balance: tuple[int, ...]
    chunks: int
    schedule: str


def _against_every_way(quick: bool) -> Report:
    """Return a table with one line per model."""
    caption = "Two CPU stages, nothing recomputed: the plan's choice beside the fastest of all that were run"
    headings = ("model", "ways", "planned", "seconds", "fastest", "seconds", "planned / fastest")
    table = Table("plan.md", "every-way", caption, headings, left=3)
    figures = {}
    for name in list(SMALL_CASES)[:1] if quick else SMALL_CASES:
        torch.manual_seed(0)
        case = SMALL_CASES[name]()
        count, chosen, best, seconds = _raced(case, quick)
        ratio = median(ratios(seconds[chosen], seconds[best]))
        shown = [f"{median(seconds[way]) * 1e3:.1f} ms" for way in (chosen, best)]
        table.add(name, count, _text(chosen), shown[0], _text(best), shown[1], f"{ratio:.2f}")
        figures[f"plan, every way, {name}: planned / fastest"] = ratio
    return Report([table], figures)


def _raced(case: Case, quick: bool) -> tuple[int, Way, Way, dict[Way, list[float]]]:
    """Return the number of candidates, the planned one, the fastest, and the seconds of both, measured in turns."""
    layers = len(case.model)
    cuts = range(1, layers, layers - 2) if quick else range(1, layers)
    chosen = _planned(case, EVERY_CHUNKS[:1] if quick else EVERY_CHUNKS)
    pipes = {
        cut: GPipe(case.model, [cut, layers - cut], devices=["cpu"] * 2, checkpoint="never")
        for cut in {*cuts, chosen.balance[0]}
    }
    try:
        steps = {
            way: partial(_step_by, pipes[cut], way, case)
            for cut in pipes
            for chunks in ((chosen.chunks,) if quick else EVERY_CHUNKS)
            for way in (Way((cut, layers - cut), chunks, schedule) for schedule in EVERY_SCHEDULE)
        }
        first = _seconds(steps, 1 if quick else FEW)
        finalists = {chosen, *sorted(first, key=lambda way: median(first[way]))[:FINALISTS]}
        later = _seconds({way: steps[way] for way in finalists}, 2 if quick else 2 * MANY)
    finally:
        for pipe in pipes.values():
            pipe.close()
    best = min(later, key=lambda way: median(later[way][::2]))
    return len(steps), chosen, best, {way: later[way][1::2] for way in (chosen, best)}


def _planned(case: Case, chunks: tuple[int, ...]) -> Way:
    plan = gpipe.plan(
        case.model, case.x, ["cpu"] * 2, target=case.y, loss_fn=case.loss, chunks=chunks, checkpoint="never", **MEAN
    )
    return Way(tuple(plan.balance), plan.chunks, plan.schedule)


def _step_by(pipe: GPipe, way: Way, case: Case) -> None:
    pipe.chunks = way.chunks
    pipe.zero_grad()
    pipe.step(case.x, case.y, loss_fn=case.loss, schedule=way.schedule, **MEAN)


def _seconds(steps: dict[Way, Callable[[], None]], rounds: int) -> dict[Way, list[float]]:
    # The first steps of a pipe measure its layers, and which are worth splitting.
    return interleaved(steps, rounds, warmups=4)


def _text(way: Way) -> str:
    return f"{way.schedule}, m={way.chunks}, {list(way.balance)}"
