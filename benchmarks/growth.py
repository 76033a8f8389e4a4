"""blockpartition where its work used to grow fast: beside older sources of it, if a folder with them is given."""

from __future__ import annotations

import importlib.util
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import median
from time import process_time
from types import ModuleType
from typing import Any

import blockpartition
from blockpartition._uncollected import uncollected

from .report import Table
from .timing import interleaved, ratios, timed

Call = Callable[[ModuleType], Any]
_UNIFORM, _FLOATS = "1 to 999", "0 to 1, floats"


def table(page: str, before: Path, rounds: int) -> Table:
    """Both take turns in one process; each is given the same problem, and a checker what its own solver found."""
    old = _load(before)
    caption = f"the least of {rounds} turns of processor time; before and after in one process"
    found = Table(page, "growth", caption, ("problem", "before, s", "after, s", "before / after"))
    for name, prepare, run in _problems():
        then, now = (_least(partial(run, module, prepare(module)), rounds) for module in (old, blockpartition))
        found.add(name, f"{then:.3g}", f"{now:.3g}", f"{then / now:.0f}")
    return found


def many_blocks(page: str, n: int, rounds: int) -> Table:
    """A million layers in ever more blocks, against adding them up; both in each turn."""
    caption = (
        f"{n} layers, {rounds} turns of processor time: the median, as a multiple of that of building prefix sums in "
        "the same turn"
    )
    counts = [64, 512, n // 100, n // 20, n // 10, n // 5, n // 2, n]
    found = Table(page, "many-blocks", caption, ("costs", *(f"{k} blocks" for k in counts)))
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
    """How many times as long as the prefix sums a call takes."""
    programs = {"base": lambda: list(accumulate(costs, initial=0)), "call": call}
    seconds = interleaved(programs, rounds, warmups=0, clock=process_time)
    return f"{median(ratios(seconds['call'], seconds['base'])):.1f}"


def _bisect_each(costs: list[Any], k: int) -> list[int]:
    """What one pass of any search by bisection has to do: k equal blocks, of which the sums are known."""
    sums = range(len(costs) + 1)
    width = len(costs) // k
    end, ends = 0, []
    for _ in range(k):
        end = bisect_left(sums, end + width, end, end + width)
        ends.append(end)
    return ends


def _cut(costs: list[Any], k: int) -> list[list[Any]]:
    """What is left when all ends are known."""
    width = len(costs) // k
    with uncollected():
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


def _problems() -> Iterator[tuple[str, Call, Callable[[ModuleType, Any], object]]]:
    """What is done, what is needed for it, and the call that counts."""
    random = Random(0)

    def drawn(n: int, limit: int) -> list[int]:
        return [random.randrange(1, limit) for _ in range(n)]

    for n in (10_000, 20_000):
        squares = [i * i for i in range(n)] + [10**15]
        yield f"solve, {n} squares and one of 10¹⁵, k = n/2", _nothing, lambda m, _, c=squares: m.solve(c, len(c) // 2)
    heavy = [*drawn(4999, 1000), 10**5]
    yield (
        "even='exact', n = 5000, k = 500, one heavy layer",
        _nothing,
        lambda m, _: m.partition(heavy, 500, even="exact"),
    )
    tail = [int(10 * random.paretovariate(1.1)) for _ in range(5000)]
    yield "even='exact', n = 5000, k = 500, a heavy tail", _nothing, lambda m, _: m.partition(tail, 500, even="exact")
    costs, transfer = drawn(10**4, 1000), drawn(10**4, 300)
    yield "place with transfer, n = 10⁴, k = 100", _nothing, lambda m, _: m.place(costs, 100, transfer=transfer)
    many = drawn(10**5, 1000)
    yield "verify a placement, n = 10⁵, k = 200", lambda m: m.place(many, 200), lambda m, p: m.verify(p, many, 200)
    few, paid = drawn(300, 1000), drawn(300, 300)
    call = {"transfer": paid, "microbatches": 8, "objective": "makespan"}
    yield (
        "verify a makespan, n = 300, k = 8",
        lambda m: m.place(few, [m.Stage(1 + j % 3) for j in range(8)], **call),
        lambda m, p: m.verify(p, few, [m.Stage(1 + j % 3) for j in range(8)], **call),
    )


def _least(call: Callable[[], object], rounds: int) -> float:
    return min(timed(call, 1, process_time) for _ in range(rounds))


def _nothing(module: ModuleType) -> None:
    return None


def _load(folder: Path) -> ModuleType:
    """The package in this folder, under another name so that both can be there."""
    name = "blockpartition_before"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not (folder / "__init__.py").is_file():
        raise SystemExit(f"--before must be a folder with the sources of blockpartition, got {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
