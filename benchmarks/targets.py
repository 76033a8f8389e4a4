"""The figures that were to be reached, beside those that the other parts found last."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from .figures import Figures, kept
from .report import Report, Table


@dataclass(frozen=True)
class Target:
    """`figures` is a pattern that names match in full; of several the worst counts, and is named."""

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


TRAINING = r"(?!.*forward only)[^:]*: "
TARGETS = [
    Target("W, D=B=1024: efficiency", r"W 1024, m=8: gpipe, checkpoint never: efficiency", 0.97, "≥"),
    Target("W, D=B=256: efficiency", r"W 256, m=8: gpipe, checkpoint never: efficiency", 0.90, "≥"),
    Target("W, D=B=64: time / torchgpipe's", r"W 64, m=8: gpipe, checkpoint never: time / torchgpipe", 0.5),
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
    Target("forward only: time / any peer's", r".*forward only.*: time / .*", 1, "<"),
    Target(
        "checkpoint always, D=B=1024: time / torchgpipe's",
        r"W 1024, m=8: gpipe, checkpoint always: time / torchgpipe",
        0.57,
    ),
    Target(
        "U-Net with skips, checkpoint always: time / torchgpipe's",
        r"U-Net, m=8: gpipe, checkpoint always: time / torchgpipe",
        0.6,
    ),
    Target(
        "W, D=B=1024, zero bubble, memory kept: speed-up over the loop / two-thread scaling",
        r"foretold, W 1024, memory kept, zero_bubble: speed-up / scaling",
        1.85,
        "≥",
    ),
    Target(
        "the same over what `simulate` foretells",
        r"foretold, W 1024, memory kept, zero_bubble: quotient",
        0.95,
        "≥",
    ),
    Target("engine a cell, empty stages, n=4, m=64", r"engine 4x64: workers", 15, unit=" µs"),
    Target("engine a cell, empty stages, n=64, m=64", r"engine 64x64: workers", 60, unit=" µs"),
    Target(
        "1F1B, saved activations of the worst stage / fill-drain's, m=32, n=4",
        r"saved activations, m=32, n=4: 1f1b / fill_drain",
        4 / 32 + 0.05,
    ),
    Target("import of `gpipe` over `import torch`", r"import: gpipe, ms", 50, unit=" ms"),
    Target("solve, n=2000, k=64", r"solve, int, n=2000, k=64: ms", 0.6, unit=" ms"),
    Target("solve, n=10⁶ ints, k=64: time / building prefix sums", r"solve, int, n=1000000, k=64: ratio", 2.5),
]


def run(options: argparse.Namespace) -> Iterator[Report]:
    figures = kept()
    headings = ("measure", "reach", "found", "", "the worst is")
    table = Table("index.md", "targets", "What was to be reached, and what was", headings, left=5)
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
