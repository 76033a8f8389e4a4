"""What `gpipe.plan` predicts beside what is measured, and how long a search takes.

Each model is planned for two CPU stages, with and without the calibration; then it is built, and `Plan.verify` trains
it for a few steps. True bytes are those of all storages that a stage makes, with parameters and buffers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

import gpipe
from gpipe._plan._costs import Measured
from gpipe._plan._search import Space, search
from gpipe.simulate import Link
from profiler import LayerProfile, Profile

from .every_way import against_every_way
from .large_plan import large
from .report import Report, Table
from .six import SIX


def run(options: argparse.Namespace) -> Iterator[Report]:
    """Predictions by model, the choice beside all others, the time of a search, what a large model takes to plan."""
    yield _predictions(options.quick)
    yield against_every_way(options.quick)
    yield _searches(options.quick)
    yield large(options.quick)


def _predictions(quick: bool) -> Report:
    caption = "Two CPU stages: seconds of a step and bytes of each device, predicted / measured"
    headings = ("model", "calibrated", "plan", "measured", "step", "device 0", "device 1")
    table = Table("plan.md", "plans", caption, headings, left=3)
    found: dict[str, list[float]] = {}
    for name in ["LSTM tagger"] if quick else SIX:
        for given in ({}, {"schedule": "fill_drain", "checkpoint": "always"}):
            for calibrate in (False, True):
                shown = _verified(name, calibrate, given)
                if shown is None:
                    continue
                plan, verified = shown
                how = f"{plan.schedule}, m={plan.chunks}, {plan.balance}, {'/'.join(plan.checkpoint)}"
                ratios = [verified.ratio, *verified.byte_ratios]
                seconds = f"{verified.seconds * 1e3:.1f} ms"
                table.add(name, "yes" if calibrate else "no", how, seconds, *(f"{ratio:.2f}" for ratio in ratios))
                found.setdefault(f"step, {'calibrated' if calibrate else 'not calibrated'}", []).append(ratios[0])
                found.setdefault("bytes", []).extend(ratios[1:])
    figures = {f"plan, {what}: median error": median(abs(x - 1) for x in ratios) for what, ratios in found.items()}
    figures |= {f"plan, {what}: largest error": max(abs(x - 1) for x in ratios) for what, ratios in found.items()}
    return Report([table], figures)


def _verified(name: str, calibrate: bool, given: dict[str, Any]) -> tuple[Any, Any] | None:
    torch.manual_seed(0)
    case = SIX[name]()
    plan = gpipe.plan(case.model, case.x, ["cpu"] * 2, target=case.y, loss_fn=case.loss, calibrate=calibrate, **given)
    pipe = plan.build(case.model)
    try:
        return plan, plan.verify(case.x, case.y)
    finally:
        pipe.close()


def _searches(quick: bool) -> Report:
    caption = "Seconds of a search: made-up layers, all schedules, each stage may recompute, twelve numbers of chunks"
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
        space = _space(layers, stages, round(share * search(space)[0].fullest))
    begin = time.perf_counter()
    found = search(space)
    return time.perf_counter() - begin, len(found)


def _space(layers: int, stages: int, memory: int | None) -> Space:
    profile = _profile(layers)
    measured = Measured(
        (profile,) * stages, (2**20,) * layers, 512, 2**20, False, False, (False,) * stages, (Link(),) * stages
    )
    chunks = [2**k for k in range(10)] + [48, 96]
    modes = (("never", "always"),) * stages
    return Space(measured, sorted(chunks), ("1f1b", "zero_bubble", "fill_drain"), modes, (memory,) * stages)


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
