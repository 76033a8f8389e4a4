"""A transformer under each schedule, with and without checkpointing: times of host and device, bubble, peak."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

import gpipe
from gpipe import GPipe

from .common import SCHEDULES, head, mean_square, peak, row, step, synchronize, transformer, two_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after the same number of warm-up steps")
    options = parser.parse_args()
    head("checkpoint", "schedule", "host ms", "until done ms", "bubble", "peak MiB")
    for chunks in (1, 8):
        row("plain model", f"{chunks} micro-batches", *plain(options, chunks))
    for mode, schedule in product(("never", "except_last"), SCHEDULES):
        row(mode, schedule, *measured(options, mode, schedule))


def measured(options: argparse.Namespace, mode: str, schedule: str) -> list[str]:
    devices = two_devices()
    pipe = GPipe(transformer(options.width, 0.1), [4, 4], devices=devices, chunks=8, checkpoint=mode)
    work = partial(step, pipe, batch(options), schedule)
    times = timed(options, work)
    with gpipe.record() as timeline:
        most = peak(devices, work)
    pipe.close()
    return [*times, f"{timeline.bubble:.3f}", most]


def plain(options: argparse.Namespace, chunks: int) -> list[str]:
    """Time the plain loop, on the first device."""
    device = two_devices()[0]
    whole, x = transformer(options.width, 0.1).to(device), batch(options)

    def work() -> None:
        whole.zero_grad()
        for rows in x.chunk(chunks):
            (mean_square(whole(rows)) / chunks).backward()

    return [*timed(options, work), "–", peak([device], work)]


def timed(options: argparse.Namespace, work: Callable[[], object]) -> list[str]:
    """Milliseconds until the host has queued a step, and until it is done."""
    devices = two_devices()

    def steps() -> None:
        for _ in range(options.steps):
            work()

    steps()
    synchronize(devices)
    start = time.perf_counter()
    steps()
    host = (time.perf_counter() - start) / options.steps
    synchronize(devices)
    done = (time.perf_counter() - start) / options.steps
    return [f"{host * 1e3:.1f}", f"{done * 1e3:.1f}"]


def batch(options: argparse.Namespace) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(options.rows, options.length, options.width, device=two_devices()[0])


if __name__ == "__main__":
    main()
