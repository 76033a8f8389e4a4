"""How long blockpartition takes: against building prefix sums, against torchgpipe's solver, and under constraints.

    python benchmarks/solve.py [--rounds 9] [--limit 1] [--largest 1000000]

Prints Markdown. Times are of the processor, since everything runs on one thread and machines are shared. Ratios are
taken within a round, where both sides run one after the other; given are the median and the least and largest round.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, product
from random import Random
from time import process_time
from typing import Any

import blockpartition
from blockpartition import Stage, place, solve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each measurement")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds given to torchgpipe's solver for one problem")
    parser.add_argument("--largest", type=int, default=10**6, help="most layers")
    options = parser.parse_args()
    print(_machine(), end="\n\n")
    against_prefix_sums(options.rounds, options.largest)
    against_torchgpipe(options.limit)
    under_constraints(options.rounds)


def against_prefix_sums(rounds: int, largest: int) -> None:
    _head("kind", "layers", "blocks", "prefix sums, ms", "solve, ms", "ratio", "least – largest")
    for kind, n, k in product(("int", "float"), (10**3, 2_000, 10**4, 10**5, 10**6), (8, 64, 512)):
        if n > largest or n <= k:
            continue
        costs = _costs(kind, n)
        base, ours = _interleaved(
            rounds, lambda c=costs: list(accumulate(c, initial=0)), lambda c=costs, k=k: solve(c, k)
        )
        ratios = [b / a for a, b in zip(base, ours, strict=True)]
        _row(
            kind,
            n,
            k,
            _ms(base),
            _ms(ours),
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f} – {max(ratios):.2f}",
        )


def against_torchgpipe(limit: float) -> None:
    try:
        from torchgpipe.balance import blockpartition as known
    except ImportError:
        print("\ntorchgpipe is not installed here: nothing to compare with.")
        return
    titles = ("costs", "layers", "blocks", f"no answer in {limit:g} s", "wrong blocks", "bottleneck / least, worst")
    _head(*titles, "its time / ours, median")
    for (name, draw), (n, k) in product(DRAWS.items(), ((8, 3), (24, 8), (100, 8), (100, 32))):
        problems = [_drawn(draw, n, seed) for seed in range(10)]
        _row(name, n, k, *_compare(known.solve, problems, k, limit))


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
    """How often the other solver gives up or errs, how far its answers are from the optimum, and its time."""
    silent, wrong, quality, times = 0, 0, [], []
    for costs in problems:
        least, ours = _timed(lambda c=costs: max(map(sum, solve(c, k))))
        try:
            with _time_limit(limit):
                blocks, theirs = _timed(lambda c=costs: other(c, k))
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


def under_constraints(rounds: int) -> None:
    _head("layers", "stages", "constraints", "place, ms", "least – largest")
    for n, k in ((200, 16), (2_000, 64)):
        for name, call in _placements(n, k):
            if name.startswith("makespan") and n > 200:
                continue
            times = [_timed(call)[1] for _ in range(rounds if n <= 200 else max(3, rounds // 3))]
            _row(n, k, name, _ms(times), f"{min(times) * 1e3:.1f} – {max(times) * 1e3:.1f}")


def _placements(n: int, k: int) -> Iterator[tuple[str, Callable[[], object]]]:
    random = Random(n)
    costs, memory = ([random.randrange(1, 1000) for _ in range(n)] for _ in range(2))
    activations, transfer = ([random.randrange(1, limit) for _ in range(n)] for limit in (100, 300))
    room = sum(memory) // k * 105 // 100 + 1000
    alike = [Stage(1, room)] * k
    unlike = [Stage(random.choice([1, 2, 3]), 2 * room) for _ in range(k)]
    kinds = [Stage(1, 2 * room), Stage(2, 3 * room)] * (k // 2)
    deep = [Stage(1, 8 * room)] * k
    yield "none", lambda: place(costs, k)
    yield "capacities", lambda: place(costs, alike, memory=memory)
    yield "capacities, three speeds", lambda: place(costs, unlike, memory=memory)
    yield (
        "capacities, 1F1B in flight",
        lambda: place(costs, deep, memory=memory, activations=activations, in_flight="1f1b"),
    )
    yield "capacities, transfer", lambda: place(costs, alike, memory=memory, transfer=transfer)
    yield "capacities, two kinds in free order", lambda: place(costs, kinds, memory=memory, order="free")
    common = {"memory": memory, "transfer": transfer, "objective": "makespan", "microbatches": 8}
    yield "makespan, exact", lambda: place(costs, unlike, **common)
    yield "makespan, gap 1 %", lambda: place(costs, unlike, **common, gap=0.01)


def _costs(kind: str, n: int) -> list[Any]:
    random = Random(n)
    return [random.randrange(1, 1000) if kind == "int" else random.random() for _ in range(n)]


def _interleaved(rounds: int, *calls: Callable[[], object]) -> list[list[float]]:
    """Seconds of each call in each round; short calls are repeated, and a first round warms up."""
    repeats = [max(1, int(0.02 / _timed(call)[1])) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for own, call, repeat in zip(times, calls, repeats, strict=True):
            own.append(min(_timed(call)[1] for _ in range(repeat)))
    return times


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = process_time()
    result = call()
    return result, process_time() - start


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Interrupt pure Python after so long; some problems make the known heuristic loop for ever."""

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


def _head(*titles: str) -> None:
    print()
    _row(*titles)
    _row(*("---" for _ in titles))


def _row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def _machine() -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
        f"blockpartition {blockpartition.__version__}; `python benchmarks/solve.py {' '.join(sys.argv[1:])}`".rstrip()
    )


if __name__ == "__main__":
    main()
