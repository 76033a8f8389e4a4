"""Time of a step: every way to train the same model on the same micro-batches, in turns."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import median

from .contenders import LOOP, PEERS, STAGES, TWO_LOOPS, Contender, Task, can_run, contenders, rival
from .match import Court, Outcomes, Rules
from .report import Report, Table
from .timing import ratios, spread
from .workloads import WORKLOADS, by_name

Comparable = Callable[[Contender], bool]
PIPELINES = ("gpipe", *PEERS)
HEADINGS = (
    "library",
    "way",
    "checkpoint",
    "ms",
    "speed-up",
    "efficiency",
    *(f"ours / {library}'s" for library in PEERS),
)


def run(options: argparse.Namespace) -> Iterator[Report]:
    rounds, turn = (2, 0.01) if options.quick else (10, 0.1)
    rules = Rules(rounds=options.rounds or rounds, turn=turn, pin=not options.unpinned)
    with Court(rules) as court:
        for task in tasks(options):
            outcomes = court.play(task, _field(task), comparable(task))
            yield Report([_table(task, outcomes, rules)], _figures(task, outcomes))


def comparable(task: Task) -> Comparable:
    """Whose results must be the loop's: where masks are drawn nobody's, and with batch norm only micro-batches'."""
    workload = by_name(task.workload)

    def same(contender: Contender) -> bool:
        if task.training and workload.looks_at_the_batch and contender.library == "plain":
            return False
        return not (task.training and workload.random)

    return same


def tasks(options: argparse.Namespace) -> list[Task]:
    tasks = [Task(name, chunks) for name in WORKLOADS for chunks in ((8, 32) if name.startswith("W ") else (8,))]
    tasks += [Task(name, 8, training=False) for name in WORKLOADS if name.startswith("W ")]
    return [task for task in tasks if _is_chosen(task, options)]


def _is_chosen(task: Task, options: argparse.Namespace) -> bool:
    if options.workload:
        return any(task.workload == name or task.workload.startswith(f"{name} ") for name in options.workload)
    return not options.quick or (task.chunks == 8 and task.workload not in ("W 256", "W 1024"))


def _field(task: Task) -> list[Contender]:
    everybody = contenders(task, quarters=by_name(task.workload).quarters is not None)
    return [one for one in everybody if can_run(one)]


def _table(task: Task, outcomes: Outcomes, rules: Rules) -> Table:
    table = Table(*place(task), _caption(task, outcomes, rules), HEADINGS, left=3)
    for contender, outcome in outcomes.items():
        if outcome.failure is not None:
            table.add(*contender.columns, f"– {table.note(outcome.failure)}", *["–"] * 5)
            continue
        table.add(
            *contender.columns,
            spread(outcome.seconds, 2 if median(outcome.seconds) < 0.01 else 1, scale=1e3),
            spread(ratios(outcomes[LOOP].seconds, outcome.seconds)),
            _optional(_efficiency(contender, task, outcomes)),
            *(_against(contender, library, outcomes) for library in PEERS),
        )
    return table


def _against(contender: Contender, library: str, outcomes: Outcomes) -> str:
    found = _ratios_to(contender, library, outcomes)
    return spread(found) if found else "–"


def _ratios_to(contender: Contender, library: str, outcomes: Outcomes) -> list[float]:
    """Our time over theirs, where there are both."""
    other = rival(contender, library, outcomes)
    if contender.library != "gpipe" or other is None:
        return []
    ours, theirs = outcomes[contender], outcomes[other]
    return [] if ours.failure or theirs.failure else ratios(ours.seconds, theirs.seconds)


def _efficiency(contender: Contender, task: Task, outcomes: Outcomes) -> float | None:
    """The speed-up over the schedule's limit, over half of what two loops gain from two threads."""
    if contender.library not in PIPELINES or contender.checkpoint != "never" or contender.schedule == "interleaved":
        return None
    if any(outcomes[one].failure for one in (contender, LOOP, TWO_LOOPS)):
        return None
    speedup = median(ratios(outcomes[LOOP].seconds, outcomes[contender].seconds))
    return speedup / limit(task) / (_scaling(outcomes) / 2)


def limit(task: Task) -> float:
    """What a pipeline gains at most: m·n/(m+n−1), with whole backwards and nothing recomputed."""
    return task.chunks * STAGES / (task.chunks + STAGES - 1)


def _scaling(outcomes: Outcomes) -> float:
    """How much more two threads do than one; 2 at best."""
    return 2 * median(ratios(outcomes[LOOP].seconds, outcomes[TWO_LOOPS].seconds))


def _figures(task: Task, outcomes: Outcomes) -> dict[str, float]:
    """By name, as in `W 1024, m=8: gpipe, checkpoint never: efficiency`."""
    found: dict[str, float] = {}
    where = _title(task)
    for contender, outcome in outcomes.items():
        if contender.library != "gpipe" or outcome.failure is not None:
            continue
        efficiency = _efficiency(contender, task, outcomes)
        if efficiency is not None:
            found[f"{where}: {contender.name}: efficiency"] = efficiency
        for library in PEERS:
            if values := _ratios_to(contender, library, outcomes):
                found[f"{where}: {contender.name}: time / {library}"] = median(values)
    return found


def _caption(task: Task, outcomes: Outcomes, rules: Rules) -> str:
    parts = [_title(task), f"{rules.rounds} rounds: medians, in brackets the quartiles", f"limit {limit(task):.2f}"]
    if not (outcomes[LOOP].failure or outcomes[TWO_LOOPS].failure):
        parts.append(f"two-thread scaling {_scaling(outcomes):.2f}")
    differences = [outcome.difference for outcome in outcomes.values() if outcome.difference is not None]
    if differences:
        parts.append(f"results differ from the loop's by at most {max(differences):.0e} of the largest")
    return "; ".join([*parts, *([] if rules.pin else ["cores as the kernel chooses"])])


def _title(task: Task) -> str:
    return f"{task.workload}, m={task.chunks}" + ("" if task.training else ", forward only")


def place(task: Task) -> tuple[str, str]:
    """The page and the name of its table."""
    page = "pipeline.md" if task.workload.startswith("W ") else "models.md"
    return page, _title(task).lower().replace(", ", "-").replace(" ", "-").replace("=", "")


def _optional(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
