"""What `gpipe.plan` chooses, beside running every balance, number of chunks and schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

import gpipe
from gpipe import GPipe

from .report import Report, Table
from .six import SMALL, Case
from .timing import interleaved

CHUNKS = (2, 4, 8)
SCHEDULES = ("1f1b", "fill_drain", "zero_bubble")
FEW, MANY = 3, 15
"""Rounds in which all take turns, and those in which the fastest do again: the luckiest of many is no measure."""

FINALISTS = 5


class Way(NamedTuple):
    """A way to train."""

    balance: tuple[int, ...]
    chunks: int
    schedule: str


def against_every_way(quick: bool) -> Report:
    """One line for each model."""
    caption = "Two CPU stages, nothing recomputed: the plan's choice beside the fastest of all that were run"
    headings = ("model", "ways", "planned", "seconds", "fastest", "seconds", "planned / fastest")
    table = Table("plan.md", "every-way", caption, headings, left=3)
    figures = {}
    for name in list(SMALL)[:1] if quick else SMALL:
        torch.manual_seed(0)
        case = SMALL[name]()
        count, chosen, best, seconds = _raced(case, quick)
        ratio = seconds[chosen] / seconds[best]
        shown = [f"{seconds[way] * 1e3:.1f} ms" for way in (chosen, best)]
        table.add(name, count, _text(chosen), shown[0], _text(best), shown[1], f"{ratio:.2f}")
        figures[f"plan, every way, {name}: planned / fastest"] = ratio
    return Report([table], figures)


def _raced(case: Case, quick: bool) -> tuple[int, Way, Way, dict[Way, float]]:
    """How many ways there are, the planned one, the fastest, and medians of those that were run longer."""
    layers = len(case.model)
    cuts = range(1, layers, layers - 2) if quick else range(1, layers)
    chosen = _planned(case, CHUNKS[:1] if quick else CHUNKS)
    pipes = {
        cut: GPipe(case.model, [cut, layers - cut], devices=["cpu"] * 2, checkpoint="never")
        for cut in {*cuts, chosen.balance[0]}
    }
    try:
        steps = {
            way: partial(_step, pipes[cut], way, case)
            for cut in pipes
            for chunks in ((chosen.chunks,) if quick else CHUNKS)
            for way in (Way((cut, layers - cut), chunks, schedule) for schedule in SCHEDULES)
        }
        first = _medians(steps, 1 if quick else FEW)
        finalists = {chosen, *sorted(first, key=first.__getitem__)[:FINALISTS]}
        again = _medians({way: steps[way] for way in finalists}, 2 if quick else MANY)
    finally:
        for pipe in pipes.values():
            pipe.close()
    return len(steps), chosen, min(again, key=again.__getitem__), again


def _planned(case: Case, chunks: tuple[int, ...]) -> Way:
    plan = gpipe.plan(
        case.model, case.x, ["cpu"] * 2, target=case.y, loss_fn=case.loss, chunks=chunks, checkpoint="never"
    )
    return Way(tuple(plan.balance), plan.chunks, plan.schedule)


def _step(pipe: GPipe, way: Way, case: Case) -> None:
    pipe.chunks = way.chunks
    pipe.zero_grad()
    pipe.step(case.x, case.y, loss_fn=case.loss, schedule=way.schedule)


def _medians(steps: dict[Way, Callable[[], None]], rounds: int) -> dict[Way, float]:
    # In its first steps a pipe finds out what its layers do, and what is worth splitting.
    found = interleaved(steps, rounds, warmups=4)
    return {way: median(seconds) for way, seconds in found.items()}


def _text(way: Way) -> str:
    return f"{way.schedule}, m={way.chunks}, {list(way.balance)}"
