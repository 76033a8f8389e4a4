"""The time of blockpartition, compared with prefix sums and torchgpipe's solver, and under constraints.

Times are of the processor, since everything runs on one thread and machines are shared. Ratios are taken within a
round, one directly after the other.
"""

from __future__ import annotations

import argparse
import signal
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, product
from random import Random
from time import process_time
from typing import Any

import blockpartition
from blockpartition import Stage, place, solve

from .measure import interleaved, ratios, repeats_within, spread, timed
from .report import Report, Table

PAGE = "solve.md"
LIMIT = 1.0  # seconds given to torchgpipe's solver for one problem


def run(options: argparse.Namespace) -> Iterator[Report]:
    rounds = options.rounds or (2 if options.quick else 9)
    yield _against_prefix_sums(rounds, 10**4 if options.quick else 10**6)
    yield Report([_against_torchgpipe(2 if options.quick else 10)])
    yield Report([_under_constraints(rounds, 200 if options.quick else 2000)])
    yield Report([_many_blocks(10**4 if options.quick else 10**6, min(rounds, 5))])


def _against_prefix_sums(rounds: int, largest: int) -> Report:
    caption = f"{rounds} rounds of processor time: medians, in brackets the quartiles"
    headings = ("kind", "layers", "blocks", "prefix sums, ms", "solve, ms", "ratio")
    table = Table(PAGE, "prefix-sums", caption, headings)
    figures: dict[str, float] = {}
    for kind, n, k in product(("int", "float"), (10**3, 2_000, 10**4, 10**5, 10**6), (8, 64, 512)):
        if n > largest or n <= k:
            continue
        base, ours = _times(_costs(kind, n), k, rounds)
        table.add(kind, n, k, _ms(base), _ms(ours), spread(ratios(ours, base)))
        figures[f"solve, {kind}, n={n}, k={k}: ms"] = statistics.median(ours) * 1e3
        figures[f"solve, {kind}, n={n}, k={k}: ratio"] = statistics.median(ratios(ours, base))
    return Report([table], figures)


def _times(costs: list[Any], k: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of adding up, and of solving. Each turn is long enough for the clock of the processor."""
    calls: tuple[Callable[[], object], ...] = (lambda: list(accumulate(costs, initial=0)), lambda: solve(costs, k))
    repeats = [repeats_within(0.02, timed(call)) for call in calls]
    rows = [[timed(call, n, process_time) for call, n in zip(calls, repeats, strict=True)] for _ in range(rounds)]
    base, ours = zip(*rows, strict=True)
    return list(base), list(ours)


def _against_torchgpipe(problems: int) -> Table:
    headings = (
        "costs",
        "layers",
        "blocks",
        "no answer",
        "wrong blocks",
        "bottleneck / least, worst",
        "its time / ours",
    )
    caption = (
        f"{problems} problems a row, drawn with fixed seeds; no answer means none in {LIMIT:g} s; times are medians"
    )
    table = Table(PAGE, "torchgpipe", caption, headings)
    try:
        from torchgpipe.balance import blockpartition as known
    except ImportError:
        table.notes.append("torchgpipe is not installed: not measured")
        return table
    for (name, draw), (n, k) in product(DRAWS.items(), ((8, 3), (24, 8), (100, 8), (100, 32))):
        drawn = [_drawn(draw, n, seed) for seed in range(problems)]
        table.add(name, n, k, *_compare(known.solve, drawn, k, LIMIT))
    return table


DRAWS: dict[str, Callable[[Random], int]] = {
    "1 to 999": lambda random: random.randrange(1, 1000),
    "1 to 3": lambda random: random.randrange(1, 4),
    "heavy tail": lambda random: int(10 * random.paretovariate(1.1)),
    "two of three zero": lambda random: random.choice([0, 0, random.randrange(1, 1000)]),
    "all equal": lambda random: 100,
}


def _drawn(draw: Callable[[Random], int], n: int, seed: int) -> list[int]:
    random = Random(seed)
    return [draw(random) for _ in range(n)]


def _compare(other: Callable[..., Any], problems: list[list[int]], k: int, limit: float) -> tuple[object, ...]:
    """Return how often the other solver gives up or errs, how far it is from the optimum, and its time."""
    silent, wrong, quality, times = 0, 0, [], []
    for costs in problems:
        least, ours = _answered(lambda c=costs: max(map(sum, solve(c, k))))
        try:
            with _time_limit(limit):
                blocks, theirs = _answered(lambda c=costs: other(c, k))
        except TimeoutError:
            silent += 1
            continue
        if [x for block in blocks for x in block] != costs or not all(blocks) or len(blocks) != k:
            wrong += 1
            continue
        quality.append(max(map(sum, blocks)) / least)
        times.append(theirs / ours)
    share = f"of {len(problems)}"
    found = (f"{max(quality):.2f}", f"{statistics.median(times):.1f}") if times else ("–", "–")
    return f"{silent} {share}", f"{wrong} {share}", *found


def _under_constraints(rounds: int, largest: int) -> Table:
    caption = f"{rounds} rounds, fewer for many layers, of processor time: medians, in brackets the quartiles"
    table = Table(PAGE, "constraints", caption, ("layers", "stages", "constraints", "place, ms"), left=3)
    for n, k in ((200, 16), (2_000, 64)):
        if n > largest:
            continue
        for name, call in _placements(n, k):
            if name.startswith("makespan") and n > 200:
                continue
            few = rounds if n <= 200 else max(2, rounds // 3)
            times = [timed(call, clock=process_time) for _ in range(few)]
            table.add(n, k, name, spread(times, 1, scale=1e3))
    return table


def _placements(n: int, k: int) -> Iterator[tuple[str, Callable[[], object]]]:
    random = Random(n)
    costs, memory = ([random.randrange(1, 1000) for _ in range(n)] for _ in range(2))
    activations, transfer = ([random.randrange(1, limit) for _ in range(n)] for limit in (100, 300))
    room = sum(memory) // k * 105 // 100 + 1000
    alike = [Stage(1, room)] * k
    unlike = [Stage(random.choice([1, 2, 3]), 2 * room) for _ in range(k)]
    deep = [Stage(1, 8 * room)] * k
    yield "none", lambda: place(costs, k)
    yield "capacities", lambda: place(costs, alike, memory=memory)
    yield "capacities, three speeds", lambda: place(costs, unlike, memory=memory)
    yield (
        "capacities, 1F1B in flight",
        lambda: place(costs, deep, memory=memory, activations=activations, in_flight="1f1b"),
    )
    yield "capacities, transfer", lambda: place(costs, alike, memory=memory, transfer=transfer)
    common = {"memory": memory, "transfer": transfer, "objective": "makespan", "microbatches": 8}
    yield "makespan, exact", lambda: place(costs, unlike, **common)
    yield "makespan, gap 1 %", lambda: place(costs, unlike, **common, gap=0.01)


def _costs(kind: str, n: int) -> list[Any]:
    random = Random(n)
    return [random.randrange(1, 1000) if kind == "int" else random.random() for _ in range(n)]


def _answered(call: Callable[[], Any]) -> tuple[Any, float]:
    start = process_time()
    result = call()
    return result, process_time() - start


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupt pure Python after a time limit; some problems make the known heuristic loop forever."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ms(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.3g}"


_UNIFORM, _FLOATS = "1 to 999", "0 to 1, floats"


def _many_blocks(n: int, rounds: int) -> Table:
    """A million layers in ever more blocks, against adding them up; both in each turn."""
    caption = (
        f"{n} layers, {rounds} turns of processor time: the median, as a multiple of that of building prefix sums in "
        "the same turn"
    )
    counts = [64, 512, n // 100, n // 20, n // 10, n // 5, n // 2, n]
    found = Table(PAGE, "many-blocks", caption, ("costs", *(f"{k} blocks" for k in counts)))
    long = _long(n)
    for name, costs in long.items():
        found.add(name, *(_share(costs, partial(blockpartition.solve, costs, k), rounds) for k in counts))
    for name in (_UNIFORM, _FLOATS):
        costs = long[name]
        shares = [_share(costs, partial(blockpartition.partition, costs, k), rounds) for k in counts]
        found.add(f"{name}, `partition`", *shares)
    for name, floor in _FLOORS.items():
        costs = long[_UNIFORM]
        found.add(f"*{name}*", *(_share(costs, partial(floor, costs, k), rounds) for k in counts))
    return found


def _share(costs: list[Any], call: Callable[[], object], rounds: int) -> str:
    """Return the time of a call as a multiple of the prefix sums' time."""
    programs = {"base": lambda: list(accumulate(costs, initial=0)), "call": call}
    seconds = interleaved(programs, rounds, warmups=0, clock=process_time)
    return f"{statistics.median(ratios(seconds['call'], seconds['base'])):.1f}"


def _bisect_each(costs: list[Any], k: int) -> list[int]:
    """Do the minimal work of any search by bisection: one pass over k equal blocks with known sums."""
    sums = range(len(costs) + 1)
    width = len(costs) // k
    end, ends = 0, []
    for _ in range(k):
        end = bisect_left(sums, end + width, end, end + width)
        ends.append(end)
    return ends


def _cut(costs: list[Any], k: int) -> list[list[Any]]:
    """Slice the costs into equal blocks, once their ends are known."""
    width = len(costs) // k
    return [costs[start : start + width] for start in range(0, width * k, width)]


_FLOORS = {"one bisection and one append a block": _bisect_each, "cutting the list, all ends known": _cut}


def _long(n: int) -> dict[str, list[Any]]:
    random = Random(n)
    return {
        _UNIFORM: [random.randrange(1, 1000) for _ in range(n)],
        "all equal": [7] * n,
        _FLOATS: [random.random() for _ in range(n)],
        "heavy tail, floats": [random.paretovariate(1.1) for _ in range(n)],
        "heavy tail": [int(10 * random.paretovariate(1.1)) for _ in range(n)],
        "squares, and one of 10¹⁵": [i * i for i in range(n - 1)] + [10**15],
    }
