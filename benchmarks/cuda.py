"""One GPU: the overhead of GPipe over a plain loop, and the memory checkpointing saves. Skipped without a GPU."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from gpipe import GPipe

from .contenders import CHECKPOINTS
from .measure import ratios, repeats_within, spread, turns
from .programs import optimizer_of
from .report import Report, Table
from .workloads import linear, total

CHUNKS, DEVICE = 8, "cuda:0"
WAYS = {"one stage": 1, "two stages on the same GPU": 2}
Step = Callable[[], None]


def run(options: argparse.Namespace) -> Iterator[Report]:
    if not torch.cuda.is_available():
        return  # the page keeps the tables of the last machine with a GPU
    widths = (256,) if options.quick else (256, 1024, 4096)
    rounds = options.rounds or (3 if options.quick else 20)
    yield Report([_times(widths, rounds)])
    yield Report([_memory(widths)])


def _times(widths: tuple[int, ...], rounds: int) -> Table:
    caption = (
        f"W on {torch.cuda.get_device_name()}, m={CHUNKS}: milliseconds until the GPU is done, and over the loop's; "
        f"{rounds} rounds: medians, in brackets the quartiles"
    )
    table = Table("cuda.md", "cuda-time", caption, ("D = B", "way", "checkpoint", "ms", "time / the loop's"), left=3)
    for width in widths:
        steps = {("loop", ""): _loop(width), **_pipes(width)}
        seconds = _rounds(steps, rounds)
        for (way, mode), own in seconds.items():
            over = spread(ratios(own, seconds["loop", ""]))
            table.add(width, way, mode, spread(own, 3, scale=1e3), over)
    return table


def _memory(widths: tuple[int, ...]) -> Table:
    caption = f"W, m={CHUNKS}: MiB allocated at the peak of a step, above parameters, their gradients and the batch"
    table = Table("cuda.md", "cuda-memory", caption, ("D = B", "way", "checkpoint", "MiB"), left=3)
    for width in widths:
        table.add(width, "loop", "", _peak(_loop(width)))
        for (way, mode), step in _pipes(width).items():
            table.add(width, way, mode, _peak(step))
    return table


def _loop(width: int) -> Step:
    model, batch = _model(width), _batch(width)
    optimizer = optimizer_of(model)

    def step() -> None:
        _zero(model)
        chunks = [chunk.requires_grad_() for chunk in batch.chunk(CHUNKS)]
        for chunk in chunks:
            total(model(chunk)).backward()
        torch.cat([chunk.grad for chunk in chunks if chunk.grad is not None])
        optimizer.step()

    return step


def _pipes(width: int) -> dict[tuple[str, str], Step]:
    return {(way, mode): _pipe(width, stages, mode) for way, stages in WAYS.items() for mode in CHECKPOINTS}


def _pipe(width: int, stages: int, mode: str) -> Step:
    model, batch = _model(width), _batch(width)
    balance = [len(model) // stages] * stages
    pipe = GPipe(model, balance, devices=[DEVICE] * stages, chunks=CHUNKS, checkpoint=mode)
    optimizer = optimizer_of(pipe)

    def step() -> None:
        _zero(pipe)
        total(pipe(batch.detach().requires_grad_())).backward()
        optimizer.step()

    return step


def _model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return linear(width, None).to(DEVICE)


def _batch(width: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(width, width, device=DEVICE)


def _zero(module: nn.Module) -> None:
    """Zero gradients in place, so that a step does not allocate them."""
    module.zero_grad(set_to_none=False)


def _rounds(steps: dict[tuple[str, str], Step], rounds: int) -> dict[tuple[str, str], list[float]]:
    for step in steps.values():
        _seconds(step, 3)
    # As many steps a turn as take the loop a few hundredths of a second: one alone would measure the launch.
    count = repeats_within(0.05, median(_seconds(steps["loop", ""], 1) for _ in range(3)), most=100)
    return turns({name: partial(_seconds, step, count) for name, step in steps.items()}, rounds)


def _seconds(step: Step, count: int) -> float:
    """Return the time per step, from before the first launch until the GPU has finished."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def _peak(step: Step) -> str:
    step()  # allocates gradients and library workspaces
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.1f}"
