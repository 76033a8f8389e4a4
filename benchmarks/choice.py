"""What the planner chooses, beside all ways to train: made-up layers on made-up devices, nothing is run.

Every balance, every number of chunks of 1, 2, 4 and 8, every schedule that a plan searches, and every mode of every
stage, for at most six layers on two or three stages; our own replay and account of bytes are the judge. A row of the
table has the same problems with other limits of memory: a little more than the least with which anything fits, a tenth
more, and none.

python -m benchmarks choice
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from random import Random

from gpipe._plan._candidate import Candidate, Space, candidate_of
from gpipe._plan._costs import Measured
from gpipe._plan._search import search
from gpipe.simulate import Link
from profiler import LayerProfile, Profile

from .report import Report, Table

ROWS, CHUNKS = 16, (1, 2, 4, 8)
SCHEDULES = ("1f1b", "zero_bubble", "fill_drain")
MODES = ("never", "except_last", "always")
CASES = 160
LIMITS = {"1.01 × the least": 1.01, "1.1 × the least": 1.1, "none": None}


def run(options: argparse.Namespace) -> Iterator[Report]:
    """One row for each limit."""
    caption = (
        "Made-up models of at most six layers on two or three stages: the plan's choice beside the fastest of all ways "
        "that fit"
    )
    table = Table("plan.md", "choice", caption, ("memory", "cases", "missed", "within 1 %", "worst"), left=1)
    figures = {}
    ratios: dict[str, list[float | None]] = {name: [] for name in LIMITS}
    for seed in range(8 if options.quick else CASES):
        for name, ratio in of_case(seed):
            ratios[name].append(ratio)
    for name, every in ratios.items():
        found = [ratio for ratio in every if ratio is not None]
        near = sum(ratio <= 1.01 for ratio in found) / len(found)
        missed = len(every) - len(found)
        table.add(name, len(every), missed, f"{near:.0%}", f"{max(found):.3f}")
        figures |= {f"plan, choice, memory {name}: missed": float(missed)}
        figures |= {f"plan, choice, memory {name}: share within 1 %": near}
        figures |= {f"plan, choice, memory {name}: chosen / fastest, worst": max(found)}
    yield Report([table], figures)


def of_case(seed: int) -> Iterator[tuple[str, float | None]]:
    """For each limit the seconds of the choice over those of the fastest way; None if nothing was found."""
    space = space_of(Random(seed))
    every = list(everything(space))
    least = min(each.fullest for each in every)
    for name, factor in LIMITS.items():
        room = None if factor is None else int(factor * least)
        best = min(each.seconds for each in every if room is None or each.fullest <= room)
        found = search([replace(space, memory=(room,) * space.measured.stages)])
        found = [each for each in found if room is None or each.fullest <= room]
        yield name, found[0].seconds / best if found else None


def everything(space: Space) -> Iterator[Candidate]:
    """All ways to train, with their seconds and bytes."""
    layers, stages = space.measured.layers, space.measured.stages
    for chunks in space.chunks:
        costs = space.measured.cut(chunks)
        for cuts in combinations(range(1, layers), stages - 1):
            sizes = tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))
            for schedule, modes in product(space.schedules, product(MODES, repeat=stages)):
                yield candidate_of(costs, schedule, sizes, modes)


def space_of(random: Random) -> Space:
    """A model and devices."""
    stages = random.choice((2, 3))
    layers = random.randint(stages, 6)
    copied = random.random() < 0.5
    figures = [_figures(random) for _ in range(layers)]
    profiles = [Profile(tuple(_layer(k, rows, *each) for k, each in enumerate(figures)), "cpu", "2", 1, 1, rows, 3)
                for rows in (1, ROWS)]  # fmt: skip
    profile = replace(profiles[1], others=(profiles[0],))
    link = random.choice((Link(), Link(1e-3, 1e6))) if copied else Link()
    measured = Measured(
        profile=profile,
        optimizer=tuple(2 * layer.trainable_bytes for layer in profile),
        rows=ROWS,
        input_bytes=4 * ROWS,
        needs_gradient=random.random() < 0.5,
        apart=copied,
        placement=tuple(range(stages)),
        links=(Link(), *(link,) * (stages - 1)),
        action=1e-4,
        step=1e-3,
    )
    return Space(measured, CHUNKS, SCHEDULES, MODES, (None,) * stages)


def _figures(random: Random) -> tuple[float, int, int, int]:
    return random.choice((1e-3, 2e-3, 5e-3)), random.randint(0, 50), random.randint(0, 400), random.randint(1, 20)


def _layer(k: int, rows: int, seconds: float, saved: int, parameters: int, output: int) -> LayerProfile:
    forward = 1e-3 + seconds * rows
    return LayerProfile(
        str(k), "Linear", forward, 2 * forward, parameters, 0, 0, (saved + output) * rows, output * rows,
        2 * (saved + output) * rows + parameters, 0, backward_input_seconds=forward,
    )  # fmt: skip
