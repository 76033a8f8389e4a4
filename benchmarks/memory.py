"""The memory of a pipe: bytes of saved activations, counted exactly, and resident memory of each library.

Saved activations: stages of the same size on the CPU. A dispatch mode (`profiler.AllocationTracker`) tracks every
storage created in the forward by a weak reference. Storages that are still alive afterwards, except the output, are
saved for the backward. They are given in units of the boundary tensors: the inputs of all stages but the first, whose
input belongs to the caller. A pipe that checkpoints has to keep these, and the full graph of the micro-batches that it
does not checkpoint. "Peak" is the most that lives at any time until the end of the backward, gradients included. A
second table has the peak memory of stages by the schedule of `step`, as measured by `gpipe.record(memory=True)`.
The pipe runs inline, because a dispatch mode applies to one thread. The programs are the same.

The third table has losses whose outputs are larger than everything else: how much of them each schedule holds.

Resident memory: the most of a few steps, above what the process had before the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import nn

import gpipe
from gpipe import GPipe
from profiler import AllocationTracker

from .compare import comparable
from .contenders import CHECKPOINTS, LOOP, Contender, Task, can_run
from .match import Match, Outcome, Rules
from .report import Report, Table

ROWS, WIDTH, CHUNKS, STAGES, BLOCKS = 256, 256, 8, 4, 4
MODELS: dict[str, Callable[[int], list[nn.Module]]] = {
    "Linear, GELU": lambda width: [nn.Linear(width, width), nn.GELU()],
    "Linear, ReLU in place": lambda width: [nn.Linear(width, width), nn.ReLU(inplace=True)],
    "Linear, LayerNorm, GELU, Dropout": lambda width: [
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.GELU(),
        nn.Dropout(0.1),
    ],
}

CONTENDERS = [
    LOOP,
    Contender("plain", threads=1),
    *(Contender(name, mode) for name in ("gpipe", "torchgpipe", "fairscale") for mode in CHECKPOINTS),
    Contender("gpipe", schedule="1f1b"),
    Contender("distributed", schedule="fill_drain"),
    Contender("distributed", schedule="1f1b"),
    Contender("distributed", "always", "fill_drain"),
]
TASKS = [Task("W 1024", 8), Task("W 1024", 32), Task("U-Net", 8)]


def run(options: argparse.Namespace) -> Iterator[Report]:
    """Saved activations by checkpoint mode and by schedule, then resident memory."""
    yield Report([_by_mode()])
    yield _by_schedule()
    yield Report([_of_losses()])
    yield Report([_resident(options)])


def _by_mode() -> Table:
    boundary = (STAGES - 1) * ROWS * WIDTH * 4
    caption = (
        f"{STAGES} stages of {BLOCKS} blocks, {ROWS} rows of {WIDTH} numbers, {CHUNKS} micro-batches; in boundary "
        f"tensors ({boundary // 1024} KiB)"
    )
    headings = ("block", "checkpoint", "kept", "beside the boundary", "peak")
    table = Table("activations.md", "activations", caption, headings, left=2)
    for (name, block), mode in product(MODELS.items(), CHECKPOINTS):
        kept, peak = _measured(block, mode)
        table.add(name, mode, *(f"{size / boundary:.2f}" for size in (kept, kept - boundary, peak)))
    return table


def _measured(block: Callable[[int], list[nn.Module]], mode: str) -> tuple[int, int]:
    """Bytes kept between forward and backward, and the most at any time."""
    pipe = _pipe(block, CHUNKS, mode)
    x = torch.randn(ROWS, WIDTH)
    with gpipe.inline():
        pipe(x).sum().backward()  # gradients and all that is made once
        with AllocationTracker() as births:
            output = pipe(x)
            kept = births.alive() - output.untyped_storage().nbytes()
            output.sum().backward()
    return kept, births.peak


def _by_schedule() -> Report:
    """Use many micro-batches; a good schedule holds few of them at once."""
    chunks, schedules = 32, ("fill_drain", "1f1b", "zero_bubble")
    caption = f"{STAGES} stages of {BLOCKS} blocks (Linear, GELU), {chunks} micro-batches, nothing checkpointed"
    headings = ("schedule", *(f"stage {j}, MiB" for j in range(STAGES)), "worst stage / fill-drain's")
    table = Table("activations.md", "schedules", caption, headings)
    peaks = {schedule: _peaks(schedule, chunks) for schedule in schedules}
    ratios = {schedule: max(own) / max(peaks["fill_drain"]) for schedule, own in peaks.items()}
    for schedule, own in peaks.items():
        table.add(schedule, *(f"{size / 2**20:.2f}" for size in own), f"{ratios[schedule]:.3f}")
    return Report([table], {f"saved activations, m={chunks}, n={STAGES}: 1f1b / fill_drain": ratios["1f1b"]})


def _peaks(schedule: str, chunks: int) -> list[int]:
    """Bytes that each stage holds at its peak."""
    pipe = _pipe(MODELS["Linear, GELU"], chunks, "never")
    x = torch.randn(ROWS, WIDTH)
    with gpipe.inline(), gpipe.record(memory=True) as timeline:
        pipe.step(x, loss_fn=lambda output, _: output.sum(), reduction="sum", schedule=schedule)
    peaks = timeline.peak_bytes
    assert peaks is not None
    return [peaks[j] for j in range(STAGES)]


def _of_losses() -> Table:
    """Use outputs that are much larger than everything else, as in language models."""
    caption = "the most MiB of a step inline, two stages, 64 rows of 16384 classes (4 MiB) in each micro-batch"
    headings = ("schedule", "checkpoint", "m=2", "m=8", "m=32", "for each more")
    table = Table("memory.md", "losses", caption, headings, left=2)
    for schedule, mode in product(("fill_drain", "1f1b"), CHECKPOINTS):
        peaks = [_peak_with_losses(chunks, schedule, mode) / 2**20 for chunks in (2, 8, 32)]
        table.add(schedule, mode, *(f"{peak:.1f}" for peak in peaks), f"{(peaks[2] - peaks[1]) / 24:.1f}")
    return table


def _peak_with_losses(chunks: int, schedule: str, mode: str) -> int:
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16384))
    pipe = GPipe(model, [2, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=mode)
    x, labels = torch.randn(64 * chunks, 16), torch.randint(16384, (64 * chunks,))
    with gpipe.inline():
        pipe.step(x, labels, loss_fn=nn.functional.cross_entropy, schedule=schedule)
        with AllocationTracker() as births:
            pipe.step(x, labels, loss_fn=nn.functional.cross_entropy, schedule=schedule)
    return births.peak


def _pipe(block: Callable[[int], list[nn.Module]], chunks: int, mode: str) -> GPipe:
    layers = [layer for _ in range(STAGES * BLOCKS) for layer in block(WIDTH)]
    balance = [len(layers) // STAGES] * STAGES
    return GPipe(nn.Sequential(*layers), balance, devices=["cpu"] * STAGES, chunks=chunks, checkpoint=mode)


def _resident(options: argparse.Namespace) -> Table:
    field = [one for one in CONTENDERS if can_run(one)]
    tasks = [Task("W 64", 8)] if options.quick else TASKS
    rules = Rules(rounds=options.rounds or 3, turn=0.01)
    headings = ("library", "schedule", "checkpoint", *(f"{task.workload}, m={task.chunks}" for task in tasks))
    caption = f"MiB above what the process had before its first step, the most of {rules.rounds + 3} steps"
    table = Table("memory.md", "footprint", caption, headings, left=3)
    # Each task uses fresh processes, so that memory cached by the allocator does not count for the next one.
    columns = [_column(task, field, rules) for task in tasks]
    for contender in field:
        table.add(*contender.columns, *(_cell(column[contender], table) for column in columns))
    return table


def _column(task: Task, field: list[Contender], rules: Rules) -> dict[Contender, Outcome]:
    with Match(rules) as match:
        return match.play(task, field, comparable(task))


def _cell(outcome: Outcome, table: Table) -> str:
    if outcome.failure is not None:
        return f"– {table.note(outcome.failure)}"
    return "not measured" if outcome.grown is None else f"{outcome.grown / 2**20:.0f}"
