"""Resident memory of each contender: the most of a few steps, above what its process had before the first."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from .compare import comparable
from .contenders import Contender, Task, can_run
from .match import Court, Outcome, Rules
from .report import Report, Table

CONTENDERS = [
    Contender("loop"),
    Contender("plain"),
    *(
        Contender(name, mode)
        for name in ("gpipe", "torchgpipe", "fairscale")
        for mode in ("never", "except_last", "always")
    ),
    Contender("gpipe", schedule="1f1b"),
    Contender("distributed", schedule="fill_drain"),
    Contender("distributed", schedule="1f1b"),
    Contender("distributed", "always", "fill_drain"),
]
TASKS = [Task("W 1024", 8), Task("W 1024", 32), Task("U-Net", 8)]


def run(options: argparse.Namespace) -> Iterator[Report]:
    field = [one for one in CONTENDERS if can_run(one)]
    rules = Rules(rounds=options.rounds or 3, turn=0.01, preload=True)
    headings = ("library", "way", "checkpoint", *(f"{task.workload}, m={task.chunks}" for task in _tasks(options)))
    caption = f"MiB above what the process had before its first step, the most of {rules.rounds + 3} steps"
    table = Table("memory.md", "footprint", caption, headings, left=3)
    # Each task has fresh processes: what one leaves to the allocator is no memory of the next.
    columns = [_column(task, field, rules) for task in _tasks(options)]
    for contender in field:
        cells = [_cell(column[contender], table) for column in columns]
        table.add(*contender.columns, *cells)
    yield Report([table])


def _tasks(options: argparse.Namespace) -> list[Task]:
    return [Task("W 64", 8)] if options.quick else TASKS


def _column(task: Task, field: list[Contender], rules: Rules) -> dict[Contender, Outcome]:
    with Court(rules) as court:
        return court.play(task, field, comparable(task))


def _cell(outcome: Outcome, table: Table) -> str:
    if outcome.failure is not None:
        return f"– {table.note(outcome.failure)}"
    return "not measured" if outcome.grown is None else f"{outcome.grown / 2**20:.0f}"
