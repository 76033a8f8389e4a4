"""The planner's choice compared with all alternatives: made-up layers on made-up devices, nothing is run.

All balances, chunks of 1, 2, 4 and 8, schedules that a plan searches, and modes of every stage are compared, for at
most six layers on two or three stages, by our own replay and memory estimate. A row of the table has the same problems
with three memory limits: a little more than the minimum, a tenth more, and none. Further rows have devices of
different memory and speed, in every order, or devices with a link to the host, on which stages may also offload saved
tensors.

python -m benchmarks choice
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from random import Random
from typing import NamedTuple

from gpipe._plan._arguments import OFFLOAD
from gpipe._plan._candidate import Candidate, SearchSpace, build_candidate
from gpipe._plan._costs import Measured
from gpipe._plan._host import Host
from gpipe._plan._links import along, links
from gpipe._plan._orders import orders
from gpipe._plan._search import search
from gpipe.simulate import Link
from profiler import LayerProfile, Profile

from .report import Report, Table

ROWS, CHUNKS = 16, (1, 2, 4, 8)
SCHEDULES = ("1f1b", "zero_bubble", "fill_drain")
MODES = ("never", "except_last", "always")
SHARES, SPEEDS = (0.6, 1.0, 1.5), (0.5, 1.0, 2.0)
"""Factors of memory and speed of unequal devices."""
LINKS = (Link(), Link(1e-3, 1e6))
CASES = 160
LIMITS = {"1.01 × the least": 1.01, "1.1 × the least": 1.1, "none": None}


def run(options: argparse.Namespace) -> Iterator[Report]:
    """Yield a table with one row per memory limit."""
    caption = (
        "Made-up models of at most six layers on two or three stages: the plan's choice beside the fastest of all ways "
        "that fit"
    )
    columns = ("devices", "memory", "cases", "missed", "within 1 %", "worst", "offloading")
    table = Table("plan.md", "choice", caption, columns, left=2)
    figures = {}
    cases: dict[tuple[str, str], list[Case | None]] = {}
    for devices, made in {"equal": equal, "different": different, "with a host": with_host}.items():
        for seed in range(8 if options.quick else CASES):
            for name, case in of_case(made(Random(seed))):
                cases.setdefault((devices, name), []).append(case)
    for (devices, name), every in cases.items():
        found = [case.ratio for case in every if case is not None]
        near = sum(ratio <= 1.01 for ratio in found) / len(found)
        missed = len(every) - len(found)
        offloading = sum("offload" in case.best.modes for case in every if case is not None)
        table.add(devices, name, len(every), missed, f"{near:.0%}", f"{max(found):.3f}", offloading)
        row = f"plan, choice, {devices} devices, memory {name}"
        figures |= {f"{row}: missed": float(missed), f"{row}: share within 1 %": near}
        figures |= {f"{row}: chosen / fastest, worst": max(found)}
    yield Report([table], figures)


class Case(NamedTuple):
    """The chosen candidate's time relative to the fastest one's."""

    ratio: float
    best: Candidate


def of_case(spaces: Sequence[SearchSpace]) -> Iterator[tuple[str, Case | None]]:
    """The choice for each limit; None if nothing was found.

    The memory of the spaces is in parts of that limit.
    """
    every = [(candidate, share_of(candidate, space)) for space in spaces for candidate in everything(space)]
    least = min(share for _, share in every)
    for name, factor in LIMITS.items():
        size = None if factor is None else factor * least
        best = min(
            (candidate for candidate, share in every if size is None or share <= size),
            key=lambda candidate: candidate.seconds,
        )
        limited = [replace(space, memory=[size and int(size * share) for share in space.memory]) for space in spaces]
        rooms = {space.measured.order: space.memory for space in limited}
        found = [candidate for candidate in search(limited) if candidate.fits(rooms[candidate.costs.measured.order])]
        yield name, Case(found[0].seconds / best.seconds, best) if found else None


def share_of(candidate: Candidate, space: SearchSpace) -> float:
    return max(need.total / share for need, share in zip(candidate.bytes, space.memory, strict=True))


def equal(random: Random) -> list[SearchSpace]:
    return [space_of(random)]


def different(random: Random) -> list[SearchSpace]:
    """A space for each order of devices of different memory and speed, and with different links."""
    space = space_of(random)
    each = [(random.choice(SHARES), random.choice(SPEEDS)) for _ in range(space.measured.stages)]
    between = links(len(each), lambda i, j: random.choice(LINKS) if space.measured.separate_memory else Link())
    found = []
    for order in orders(each, between):
        speeds = tuple(each[k][1] for k in order)
        measured = replace(space.measured, order=order, speeds=speeds, links=along(between, order))
        found.append(replace(space, measured=measured, memory=[each[k][0] for k in order]))
    return found


def with_host(random: Random) -> list[SearchSpace]:
    """Return a space whose stages may offload, with a link to the host that sometimes makes it the fastest choice."""
    space = space_of(random)
    host = Host(bandwidth=random.choice((1e5, 1e6, 1e7)))
    return [replace(space, measured=replace(space.measured, separate_memory=True, host=host), modes=(*MODES, OFFLOAD))]


def everything(space: SearchSpace) -> Iterator[Candidate]:
    """Yield all candidates, with their seconds and bytes."""
    layers, stages = space.measured.layers, space.measured.stages
    for chunks in space.chunks:
        costs = space.measured.cut(chunks)
        for cuts in combinations(range(1, layers), stages - 1):
            sizes = tuple(b - a for a, b in zip((0, *cuts), (*cuts, layers), strict=True))
            for schedule, modes in product(space.schedules, product(space.modes, repeat=stages)):
                yield build_candidate(costs, schedule, sizes, modes)


def space_of(random: Random) -> SearchSpace:
    """A model and devices."""
    stages = random.choice((2, 3))
    layers = random.randint(stages, 6)
    copied = random.random() < 0.5
    figures = [_figures(random) for _ in range(layers)]
    profiles = [Profile(tuple(_layer(k, rows, *each) for k, each in enumerate(figures)), "cpu", "2", 1, 1, rows, 3)
                for rows in (1, ROWS)]  # fmt: skip
    profile = replace(profiles[1], others=(profiles[0],))
    link = random.choice(LINKS) if copied else Link()
    measured = Measured(
        profile=profile,
        optimizer=tuple(2 * layer.trainable_bytes for layer in profile),
        rows=ROWS,
        input_bytes=4 * ROWS,
        needs_gradient=random.random() < 0.5,
        separate_memory=copied,
        placement=tuple(range(stages)),
        links=(Link(), *(link,) * (stages - 1)),
        action=1e-4,
        step=1e-3,
    )
    return SearchSpace(measured, CHUNKS, SCHEDULES, MODES, (1.0,) * stages)


def _figures(random: Random) -> tuple[float, int, int, int]:
    return random.choice((1e-3, 2e-3, 5e-3)), random.randint(0, 50), random.randint(0, 400), random.randint(1, 20)


def _layer(k: int, rows: int, seconds: float, saved: int, parameters: int, output: int) -> LayerProfile:
    forward = 1e-3 + seconds * rows
    return LayerProfile(
        str(k), "Linear", forward, 2 * forward, parameters, 0, 0, (saved + output) * rows, output * rows,
        2 * (saved + output) * rows + parameters, 0, backward_input_seconds=forward,
    )  # fmt: skip
