"""Alternatives for a model too large for one device: time, bytes per device, lines changed.

Everything is on the CPU. A device is a process, or a worker of `GPipe`, with one thread; two of them share the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain
from statistics import median

from .contenders import IN_TWO_PROCESSES, Contender, Task
from .match import Match, Outcome, Rules
from .measure import ratios, spread
from .report import Report, Table
from .ways import WAYS, lines_changed

TASK = Task("Llama by sample", 8)
ONE_DEVICE = Contender("one device", threads=1)
FIELD = [
    ONE_DEVICE,
    Contender("one device", threads=2),
    *(Contender(name, threads=1 if name in IN_TWO_PROCESSES else None) for name in WAYS if name != "one device"),
]
HEADINGS = ("way", "processes", "ms", "time / one device's", "MB, device 0", "MB, device 1", "lines changed")


def run(options: argparse.Namespace) -> Iterator[Report]:
    """One table."""
    rules = Rules(rounds=options.rounds or (2 if options.quick else 10), turn=0.01 if options.quick else 0.1)
    caption = (
        "A training step of a Llama of four blocks of width 256, 16 rows of 64 words, AdamW; "
        f"{rules.rounds} rounds: medians, in brackets the quartiles; MB of parameters, gradients and optimizer"
    )
    table, figures = Table("alternatives.md", "alternatives", caption, HEADINGS), {}
    with Match(rules) as match:
        outcomes = match.play(TASK, FIELD, lambda _: True)
        one = outcomes[ONE_DEVICE]
        for contender, outcome in outcomes.items():
            name = _name(contender)
            if outcome.failure is not None:
                table.add(name, "–", f"– {table.note(outcome.failure)}", *["–"] * 4)
                continue
            held = list(chain(*match.ask(contender, "held")))
            table.add(name, *_cells(contender, outcome, one, held))
            figures[f"alternatives: {name}: bytes of the fullest device"] = float(max(held))
            figures[f"alternatives: {name}: time / one device"] = median(ratios(outcome.seconds, one.seconds))
    yield Report([table], figures)


def _name(contender: Contender) -> str:
    return "one device, two threads" if contender.threads == 2 else contender.library


def _cells(contender: Contender, outcome: Outcome, one: Outcome, held: list[int]) -> list[object]:
    bytes_of = [f"{size / 1e6:.1f}" for size in held]
    changed = lines_changed(contender.library)
    return [
        2 if contender.library in IN_TWO_PROCESSES else 1,
        spread(outcome.seconds, 1, scale=1e3),
        spread(ratios(outcome.seconds, one.seconds)),
        *bytes_of,
        *["–"] * (2 - len(bytes_of)),
        changed or "–",
    ]
