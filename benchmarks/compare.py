"""Time of a step: every way to train the same model on the same micro-batches, in turns."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from statistics import median

import torch

from .contenders import (
    LOOP,
    PEERS,
    PIPELINES,
    RANKS,
    SCHEDULES,
    STAGES,
    TWO_LOOPS,
    Contender,
    Task,
    can_run,
    contenders,
    rivals,
)
from .match import Match, Outcomes, Rules
from .measure import allocator, other_torch, ratios, spread
from .report import Report, Table
from .workloads import WORKLOADS, by_name

Comparable = Callable[[Contender], bool]
HEADINGS = (
    "library",
    "schedule",
    "checkpoint",
    "allocator",
    "threads",
    "ms",
    "page faults",
    "speed-up",
    "efficiency",
    *(f"ours / {library}'s" for library in PEERS),
)


def of_steps(options: argparse.Namespace) -> Iterator[Report]:
    """A table for each workload and number of micro-batches."""
    rounds, turn = (2, 0.01) if options.quick else (10, 0.1)
    rules = Rules(rounds=options.rounds or rounds, turn=turn, pin=not options.unpinned)
    with Match(rules) as match:
        for task in tasks(options):
            outcomes = match.play(task, _field(task), comparable(task))
            yield Report([_table(task, outcomes, rules)], _figures(task, outcomes))


def comparable(task: Task) -> Comparable:
    """Return a predicate: whether a contender's results should match the loop's.

    Random masks make all results differ. With batch norm, only runs in micro-batches match.
    """
    workload = by_name(task.workload)

    def same(contender: Contender) -> bool:
        if task.training and workload.has_batch_norm and contender.library == "plain":
            return False
        return not (task.training and workload.random)

    return same


def tasks(options: argparse.Namespace) -> list[Task]:
    """Return the tasks selected by the options; by default, all."""
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
    table = Table(*place(task), _caption(task, outcomes, rules), HEADINGS, left=4)
    for contender, outcome in outcomes.items():
        words = *contender.columns, contender.allocator
        if outcome.failure is not None:
            table.add(*words, contender.threads or "–", f"– {table.note(outcome.failure)}", *["–"] * (len(PEERS) + 3))
            continue
        efficiency = _efficiency(contender, task, outcomes)
        table.add(
            *words,
            outcome.threads,
            spread(outcome.seconds, 2 if median(outcome.seconds) < 0.01 else 1, scale=1e3),
            f"{median(outcome.faults):.0f}",
            spread(_speedups(contender, outcomes)) if _speedups(contender, outcomes) else "–",
            "–" if efficiency is None else f"{efficiency:.2f}",
            *(spread(found) if (found := against(contender, library, outcomes)) else "–" for library in PEERS),
        )
    return table


def against(contender: Contender, library: str, outcomes: Outcomes) -> list[float]:
    """Return our time over the rival's per round; a rival with several thread counts is represented by its fastest."""
    if contender.library != "gpipe" or outcomes[contender].failure:
        return []
    times = [outcomes[one].seconds for one in rivals(contender, library, outcomes) if not outcomes[one].failure]
    return ratios(outcomes[contender].seconds, min(times, key=median)) if times else []


def _speedups(contender: Contender, outcomes: Outcomes) -> list[float]:
    """Over the loop with the same allocator, in each round."""
    loop = outcomes[_like(LOOP, contender)]
    return [] if loop.failure else ratios(loop.seconds, outcomes[contender].seconds)


def _efficiency(contender: Contender, task: Task, outcomes: Outcomes) -> float | None:
    """Return the speed-up over the schedule's limit, relative to half of the gain of two loops on two threads.

    The loop has one thread, so this applies to machines on which a worker also has one.
    """
    whole = contender.library in PIPELINES and contender.checkpoint == "never" and contender.schedule != "interleaved"
    loops = [_like(one, contender) for one in (LOOP, TWO_LOOPS)]
    if not whole or torch.get_num_threads() >= 2 * STAGES:
        return None
    if any(one not in outcomes or outcomes[one].failure for one in (contender, *loops)):
        return None
    scaling = two_thread_scaling(outcomes, contender.keep_memory)
    return median(_speedups(contender, outcomes)) / limit(task) / (scaling / 2)


def limit(task: Task) -> float:
    """Return the largest speed-up of a pipeline, m·n/(m+n−1), without recomputation or split backwards."""
    return task.chunks * STAGES / (task.chunks + STAGES - 1)


def two_thread_scaling(outcomes: Outcomes, keep_memory: bool = False) -> float:
    """Return the throughput of two threads relative to one; at best 2."""
    loop, two_loops = [one.keeping_memory() if keep_memory else one for one in (LOOP, TWO_LOOPS)]
    return 2 * median(ratios(outcomes[loop].seconds, outcomes[two_loops].seconds))


def _like(baseline: Contender, contender: Contender) -> Contender:
    return baseline.keeping_memory() if contender.keep_memory else baseline


def _figures(task: Task, outcomes: Outcomes) -> dict[str, float]:
    """Return figures by name, e.g. `W 1024, m=8: gpipe, checkpoint never: efficiency`."""
    found: dict[str, float] = {}
    where = _title(task)
    for contender, outcome in outcomes.items():
        if contender.library != "gpipe" or outcome.failure is not None:
            continue
        efficiency = _efficiency(contender, task, outcomes)
        if efficiency is not None:
            found[f"{where}: {contender.name}: efficiency"] = efficiency
        for library in PEERS:
            if values := against(contender, library, outcomes):
                found[f"{where}: {contender.name}: time / {library}"] = median(values)
    return found


def _caption(task: Task, outcomes: Outcomes, rules: Rules) -> str:
    parts = [
        _title(task),
        f"{rules.rounds} rounds: medians, in brackets the quartiles",
        f"allocator: {allocator()}",
        f"limit {limit(task):.2f}",
    ]
    if not (outcomes[LOOP].failure or outcomes[TWO_LOOPS].failure):
        parts.append(f"two-thread scaling {two_thread_scaling(outcomes):.2f}")
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


RANKS_WORKLOADS = ("W 64", "W 512", "W 1024", "GPT-2", "Uneven")
RANKS_HEADINGS = ("library", "schedule", "ms", "page faults", "time / torch's", "time / even cuts")


def of_ranks(options: argparse.Namespace) -> Iterator[Report]:
    """Compare `gpipe.distributed.Rank` with torch.distributed.pipelining, each in two processes over gloo."""
    rounds, turn = (2, 0.01) if options.quick else (10, 0.1)
    rules = Rules(rounds=options.rounds or rounds, turn=turn, pin=not options.unpinned)
    with Match(rules) as match:
        for name in options.workload or (("W 64", "Uneven") if options.quick else RANKS_WORKLOADS):
            task = Task(name, 8)
            outcomes = match.play(task, field_of_ranks(task), comparable(task))
            yield _report_of_ranks(task, outcomes, rules)


def field_of_ranks(task: Task) -> list[Contender]:
    """Both under each schedule; on an uneven model under one, and with even cuts too."""
    workload = by_name(task.workload)
    if workload.even:
        return [LOOP, *(Contender(library, schedule="1f1b") for library in RANKS)]
    schedules = [name for name in SCHEDULES if workload.quarters or name != "interleaved"]
    return [LOOP, *(Contender(library, schedule=name) for name in schedules for library in ("ranks", "distributed"))]


def _report_of_ranks(task: Task, outcomes: Outcomes, rules: Rules) -> Report:
    title = ", ".join([task.workload, f"m={task.chunks}", *([f"torch {other}"] if (other := other_torch()) else [])])
    name = "ranks-" + title.lower().replace(", ", "-").replace(" ", "-").replace("=", "")
    caption = f"{title}; two processes; {rules.rounds} rounds: medians, in brackets the quartiles"
    table, figures = Table("ranks.md", name, caption, RANKS_HEADINGS, left=2), {}
    for contender, outcome in outcomes.items():
        if outcome.failure is not None:
            table.add(contender.library, contender.schedule, f"– {table.note(outcome.failure)}", "–", "–", "–")
            continue
        over = {what: _over(contender, other, outcomes) for what, other in _others(contender).items()}
        table.add(
            contender.library,
            contender.schedule,
            spread(outcome.seconds, 2 if median(outcome.seconds) < 0.01 else 1, scale=1e3),
            f"{median(outcome.faults):.0f}",
            *(spread(over[what]) if over.get(what) else "–" for what in ("distributed", "even cuts")),
        )
        for what, found in over.items():
            if found:
                figures[f"ranks, {title}: {contender.schedule}: time / {what}"] = median(found)
    return Report([table], figures)


def _others(contender: Contender) -> dict[str, Contender]:
    """Return the baselines of our ranks: torch's with the same cuts, and ours with even ones."""
    if contender.library != "ranks":
        return {}
    others = {"distributed": "distributed", "even cuts": "ranks, even cuts"}
    return {what: Contender(library, schedule=contender.schedule) for what, library in others.items()}


def _over(ours: Contender, other: Contender, outcomes: Outcomes) -> list[float]:
    """One ratio a round; none if the other has not played, or failed."""
    theirs = outcomes.get(other)
    return ratios(outcomes[ours].seconds, theirs.seconds) if theirs is not None and theirs.failure is None else []
