"""Targets, and the latest measurements by the other parts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .report import Figures, Report, Table, kept


@dataclass(frozen=True)
class Target:
    """A bound for all figures whose names match the pattern `figures` in full; the worst one counts."""

    measure: str
    figures: str
    reach: float
    sign: str = "≤"
    unit: str = ""

    def met(self, value: float) -> bool:
        return {"≤": value <= self.reach, "<": value < self.reach, "≥": value >= self.reach}[self.sign]

    @property
    def worst(self) -> Callable[[Iterable[tuple[float, str]]], tuple[float, str]]:
        return min if self.sign == "≥" else max


TRAINING = r"(?!ranks|.*forward only)[^:]*: "
TARGETS = [
    Target("W, D=B=1024: efficiency", r"W 1024, m=8: gpipe, checkpoint never: efficiency", 0.97, "≥"),
    Target("W, D=B=256: efficiency", r"W 256, m=8: gpipe, checkpoint never: efficiency", 0.95, "≥"),
    Target("W, D=B=64: time / torchgpipe's", r"W 64, m=8: gpipe, checkpoint never: time / torchgpipe", 0.45),
    Target(
        "checkpoint always, D=B=1024: time / torchgpipe's",
        r"W 1024, m=8: gpipe, checkpoint always: time / torchgpipe",
        0.57,
    ),
    Target(
        "zero bubble, D=B=1024: speed-up over the loop",
        r"predicted, W 1024, memory given back, zero_bubble: speed-up",
        1.6,
        "≥",
    ),
    Target(
        "zero bubble, D=B=1024, memory kept: speed-up over the loop / (two-thread scaling / 2)",
        r"predicted, W 1024, memory kept, zero_bubble: speed-up / scaling",
        1.85,
        "≥",
    ),
    Target(
        "the same over the speed-up that `simulate` predicts",
        r"predicted, W 1024, memory kept, zero_bubble: quotient",
        0.95,
        "≥",
    ),
    Target(
        "GPT-2 blocks with dropout: time / torch.distributed.pipelining's, the same schedule",
        r"GPT-2, m=8: gpipe, .*: time / distributed",
        1,
    ),
    Target("every workload: time / torchgpipe's", rf"{TRAINING}gpipe, checkpoint \w+: time / torchgpipe", 1, "<"),
    Target("every workload: time / fairscale's", rf"{TRAINING}gpipe, checkpoint \w+: time / fairscale", 1, "<"),
    Target(
        "every workload: time / torch.distributed.pipelining's, the same schedule",
        rf"{TRAINING}.*: time / distributed",
        1,
        "<",
    ),
    Target(
        "every workload, `step` with any schedule: time / torchgpipe's or fairscale's",
        rf"{TRAINING}gpipe, \w+, .*: time / (torchgpipe|fairscale)",
        1,
        "<",
    ),
    Target(
        "`gpipe.distributed.Rank`: time / torch.distributed.pipelining's, both in two processes, the same schedule",
        r"ranks, .*: time / distributed",
        1,
    ),
    Target("`Rank` on an uneven model: time / that of even cuts", r"ranks, Uneven.*: time / even cuts", 1, "<"),
    Target("forward only: time / any peer's", r".*forward only.*: time / .*", 1, "<"),
    Target("engine, empty stages, n=4, m=64: time of a cell / the plain loop's", r"engine 4x64: workers / loop", 2),
    Target("import of `gpipe` over `import torch`", r"import: gpipe, ms", 40, unit=" ms"),
    Target(
        "1F1B, saved activations of the worst stage / fill-drain's, m=32, n=4",
        r"saved activations, m=32, n=4: 1f1b / fill_drain",
        4 / 32 + 0.05,
    ),
    Target("solve, n=2000, k=64", r"solve, int, n=2000, k=64: ms", 0.6, unit=" ms"),
    Target("solve, n=10⁶ ints, k ≤ 512: time / building prefix sums", r"solve, int, n=1000000, k=\d{1,3}: ratio", 2.5),
]


def run(options: argparse.Namespace) -> Iterator[Report]:
    """One table, from the figures that are kept."""
    figures = kept()
    headings = ("measure", "reach", "found", "", "the worst is")
    table = Table("index.md", "targets", "The figures to reach, and those measured", headings, left=5)
    for target in TARGETS:
        _add(table, target, figures)
    yield Report([table])


def _add(table: Table, target: Target, figures: Figures) -> None:
    reach = f"{target.sign} {target.reach:g}{target.unit}"
    found = [(value, name) for name, (value, _) in figures.items() if re.fullmatch(target.figures, name)]
    if not found:
        table.add(target.measure, reach, "not measured", "", "")
        return
    value, name = target.worst(found)
    mark = table.note(figures[name][1])
    where = f"of {len(found)}: {name}" if len(found) > 1 else ""
    table.add(
        target.measure, reach, f"{value:.2f}{target.unit} {mark}", "reached" if target.met(value) else "missed", where
    )
