"""A searched schedule compared with the named ones that suit the stages: simulated time and memory, nothing is run.

Stages are on one worker each, in loops or in a V, with three cost models and three memory limits: none, 1F1B's, and
half of 1F1B's. The best named schedule is the fastest that fits.

python -m benchmarks searched
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import fmean
from typing import NamedTuple

from gpipe.schedule import SCHEDULES, Schedule, in_flight, looped_placement, named, v_placement
from gpipe.simulate import StageCost, makespan, search

from .report import Report, Table

WORKERS, MICROBATCHES = (2, 4, 8), (8, 16, 64)
PLACEMENTS = {
    "one stage each": lambda workers: list(range(workers)),
    "loops": lambda workers: looped_placement(2 * workers, workers),
    "V": lambda workers: v_placement(2 * workers),
}
COSTS = ("equal", "uneven", "transfers")
LIMITS = ("none", "1F1B's", "half")


class Case(NamedTuple):
    """A problem, and the most micro-batches of a stage that a worker may hold."""

    workers: int
    microbatches: int
    costs: str
    limit: str
    placement: list[int]

    @property
    def most(self) -> int | None:
        # With two stages per worker, a micro-batch of a stage is half as large.
        stages = len(self.placement)
        return {"none": None, "1F1B's": stages, "half": stages // 2}[self.limit]

    @property
    def stages(self) -> list[StageCost]:
        """A forward takes 1; uneven: as a transformer's, with an embedding first, and a large head last."""
        input_, weight = (1.0, 1.0) if self.costs == "equal" else (1.1, 0.8)
        factors = [1.0] * len(self.placement)
        if self.costs == "uneven":
            factors[0], factors[-1] = 0.8, 1.4
        return [
            StageCost(x, x * (input_ + weight), backward_input=x * input_, activation_bytes=1, boundary_bytes=1)
            for x in factors
        ]

    @property
    def transfer(self) -> float:
        return 0.25 if self.costs == "transfers" else 0.0

    def seconds(self, schedule: Schedule) -> float:
        return makespan(schedule, self.stages, placement=self.placement, transfer=self.transfer)

    def held(self, schedule: Schedule) -> int:
        worker_steps = schedule.on(self.placement)
        return max(in_flight(tuple(step.action for step in steps)) for steps in worker_steps)

    def searched(self) -> Schedule:
        return search(
            self.stages,
            microbatches=self.microbatches,
            placement=self.placement,
            transfer=self.transfer,
            memory=self.most,
        )


class Found(NamedTuple):
    """The best named schedule that fits, if any, and the one that was searched."""

    case: Case
    name: str | None
    best: float | None
    schedule: Schedule
    searching: float

    @property
    def seconds(self) -> float:
        return self.case.seconds(self.schedule)

    @property
    def ratio(self) -> float | None:
        return None if self.best is None else self.seconds / self.best


def run(options: argparse.Namespace) -> Iterator[Report]:
    """Yield one row per number of workers and micro-batches, and a summary. Search times are in processor seconds."""
    found = {name: [*_found(place, options)] for name, place in PLACEMENTS.items()}
    tables = [_summary(found), *(_table(name, each) for name, each in found.items()), _in_v(options)]
    figures = {}
    for name, each in found.items():
        ratios = [one.ratio for one in each if one.ratio is not None]
        figures[f"searched, {name}: time / the best named schedule's, worst"] = max(ratios)
        figures[f"searched, {name}: seconds, worst"] = max(one.searching for one in each)
    yield Report(tables, figures)


def _found(place: object, options: argparse.Namespace) -> Iterator[Found]:
    assert callable(place)
    sizes = [(2, 8)] if options.quick else [*product(WORKERS, MICROBATCHES)]
    for (workers, m), costs, limit in product(sizes, COSTS, LIMITS):
        case = Case(workers, m, costs, limit, place(workers))
        best = min(_named(case), default=(None, None))
        start = time.process_time()
        schedule = case.searched()
        yield Found(case, best[1], best[0], schedule, time.process_time() - start)


def _named(case: Case) -> Iterator[tuple[float, str]]:
    for name in SCHEDULES:
        try:
            schedule = named(name, case.microbatches, case.placement)
        except ValueError:  # it needs a different placement
            continue
        if case.most is None or case.held(schedule) <= case.most:
            yield case.seconds(schedule), name


def _summary(found: dict[str, list[Found]]) -> Table:
    columns = (
        "stages",
        "memory",
        "cases",
        "a named one fits",
        "mean ratio",
        "worst ratio",
        "least ratio",
        "longest search",
    )
    table = Table(
        "schedules.md", "searched", "The time of the searched schedule / of the best named one", columns, left=2
    )
    for (name, each), limit in product(found.items(), LIMITS):
        own = [one for one in each if one.case.limit == limit]
        ratios = [one.ratio for one in own if one.ratio is not None]
        figures = tuple(f"{value(ratios):.3f}" if ratios else "" for value in (fmean, max, min))
        table.add(name, limit, len(own), len(ratios), *figures, f"{max(one.searching for one in own):.2f} s")
    return table


def _table(name: str, found: Sequence[Found]) -> Table:
    columns = ("costs", "n", "m", "memory", "best named", "time", "held", "searched", "held", "ratio", "search")
    caption = f"Stages on workers: {name}. Times in units of a forward; held: micro-batches of a stage on a worker"
    table = Table("schedules.md", f"searched-{name.replace(' ', '-').lower()}", caption, columns)
    for one in sorted(found, key=lambda each: COSTS.index(each.case.costs)):
        case = one.case
        usual = ("none fits", "", "")
        if one.name is not None and one.best is not None:
            held = case.held(named(one.name, case.microbatches, case.placement))
            usual = (one.name, f"{one.best:.1f}", str(held))
        ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
        ours = f"{one.seconds:.1f}", case.held(one.schedule), ratio, f"{one.searching:.2f} s"
        table.add(case.costs, case.workers, case.microbatches, case.limit, *usual, *ours)
    return table


def _in_v(options: argparse.Namespace) -> Table:
    """Compare the search with V-Half and V-Min at their published memory: the bubble over 1F1B's."""
    caption = (
        "In a V, with the memory of V-Half and V-Min, and equal costs: idle time / that of 1F1B, with m = 2n; "
        "published: about 1/2 and 2/3"
    )
    columns = ("n", "1F1B holds", "V-Half holds", "bubble", "V-Min holds", "bubble")
    table = Table("schedules.md", "searched-v-half-min", caption, columns)
    for workers in (2,) if options.quick else range(2, 9):
        cells = list[object]()
        for most in (2 * ((workers + 2) // 2), 2 * ((workers + 4) // 3)):
            m, place = 2 * workers, v_placement(2 * workers)
            stages = [StageCost(1, 2, activation_bytes=1)] * (2 * workers)
            schedule = search(stages, microbatches=m, placement=place, memory=most)
            idle = makespan(schedule, stages, placement=place) - 6 * m
            cells += [most, f"{idle / (6 * (workers - 1)):.2f}"]
        table.add(workers, 2 * workers, *cells)
    return table
