"""Where the engine's microseconds go: a deterministic profile of an inline run on stages that do nothing."""

from __future__ import annotations

import argparse
import cProfile
import pstats
from collections.abc import Iterator
from pathlib import Path

import torch

import gpipe

from . import empty
from .report import Report, Table

STAGES, MICROBATCHES, TOP = 4, 64, 25


def run(options: argparse.Namespace) -> Iterator[Report]:
    torch.set_num_threads(1)
    runs = options.rounds or (2 if options.quick else 20)
    yield Report([_table(_profiled(runs, checkpoint), runs, checkpoint) for checkpoint in ("never", "always")])


def _profiled(runs: int, checkpoint: str) -> pstats.Stats:
    pipe, rows = empty.pipe(STAGES, MICROBATCHES, checkpoint), empty.rows(MICROBATCHES)
    ones = torch.ones(MICROBATCHES, 1)
    profile = cProfile.Profile()
    with gpipe.inline():
        pipe(rows).backward(ones)
        for _ in range(runs):
            profile.enable()
            pipe(rows).backward(ones)
            profile.disable()
    return pstats.Stats(profile)


def _table(stats: pstats.Stats, runs: int, checkpoint: str) -> Table:
    entries = stats.stats  # type: ignore[attr-defined]
    cells = runs * STAGES * MICROBATCHES
    whole = sum(own for _, _, own, _, _ in entries.values())
    caption = (
        f"{STAGES} stages, {MICROBATCHES} micro-batches, inline, checkpoint {checkpoint}, {runs} runs under cProfile: "
        f"{whole / cells * 1e6:.1f} µs a cell, of which the {TOP} functions that take most themselves"
    )
    table = Table("engine.md", f"hotspots-{checkpoint}", caption, ("function", "calls a cell", "µs a cell", "share"))
    for where, (_, calls, own, _, _) in sorted(entries.items(), key=lambda entry: -entry[1][2])[:TOP]:
        table.add(_name(where), f"{calls / cells:.2f}", f"{own / cells * 1e6:.2f}", f"{own / whole:.1%}")
    return table


def _name(where: tuple[str, int, str]) -> str:
    """The file as in the package, without where it is installed."""
    file, line, function = where
    if file == "~":
        return f"`{function}`"
    path = Path(file)
    return f"`{path.parent.name}/{path.name}:{line} {function}`"
