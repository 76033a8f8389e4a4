"""`gpipe.distributed.Rank` beside torch.distributed.pipelining: both in two processes, over gloo, in turns."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median

from .compare import comparable
from .contenders import LOOP, RANKS, SCHEDULES, Contender, Task
from .match import Match, Outcomes, Rules
from .report import Report, Table
from .timing import ratios, spread
from .workloads import by_name

WORKLOADS = ("W 64", "W 512", "W 1024", "GPT-2", "Uneven")
HEADINGS = ("library", "schedule", "ms", "page faults", "time / torch's", "time / even cuts")


def run(options: argparse.Namespace) -> Iterator[Report]:
    """A table for each workload."""
    rounds, turn = (2, 0.01) if options.quick else (10, 0.1)
    rules = Rules(rounds=options.rounds or rounds, turn=turn, pin=not options.unpinned)
    with Match(rules) as match:
        for name in options.workload or (("W 64", "Uneven") if options.quick else WORKLOADS):
            task = Task(name, 8)
            outcomes = match.play(task, field(task), comparable(task))
            yield _report(task, outcomes, rules)


def field(task: Task) -> list[Contender]:
    """Both under each schedule; on an uneven model under one, and with even cuts too."""
    workload = by_name(task.workload)
    if workload.even:
        return [LOOP, *(Contender(library, schedule="1f1b") for library in RANKS)]
    schedules = [name for name in SCHEDULES if workload.quarters or name != "interleaved"]
    return [LOOP, *(Contender(library, schedule=name) for name in schedules for library in ("ranks", "distributed"))]


def _report(task: Task, outcomes: Outcomes, rules: Rules) -> Report:
    title = f"{task.workload}, m={task.chunks}"
    name = "ranks-" + title.lower().replace(", ", "-").replace(" ", "-").replace("=", "")
    caption = f"{title}; two processes; {rules.rounds} rounds: medians, in brackets the quartiles"
    table, figures = Table("ranks.md", name, caption, HEADINGS, left=2), {}
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
    """What ours are compared with: torch's with the same cuts, and ours with even ones."""
    if contender.library != "ranks":
        return {}
    others = {"distributed": "distributed", "even cuts": "ranks, even cuts"}
    return {what: Contender(library, schedule=contender.schedule) for what, library in others.items()}


def _over(ours: Contender, other: Contender, outcomes: Outcomes) -> list[float]:
    """One ratio a round; none if the other has not played, or failed."""
    theirs = outcomes.get(other)
    return ratios(outcomes[ours].seconds, theirs.seconds) if theirs is not None and theirs.failure is None else []
