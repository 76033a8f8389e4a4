"""A transformer under each schedule, with and without checkpointing: times of host and device, bubble, peak."""

from __future__ import annotations

import argparse
import time
from functools import partial
from itertools import product

import torch
from torch import nn

import gpipe
from gpipe import GPipe

from .common import SCHEDULES, head, peak, row, step, synchronize, two_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5, help="of which the mean is taken, after as many to warm up")
    options = parser.parse_args()
    head("checkpoint", "schedule", "host ms", "until done ms", "bubble", "peak MiB")
    for mode, schedule in product(("never", "except_last"), SCHEDULES):
        row(mode, schedule, *measured(options, mode, schedule))


def measured(options: argparse.Namespace, mode: str, schedule: str) -> list[str]:
    devices = two_devices()
    torch.manual_seed(0)
    layer = partial(nn.TransformerEncoderLayer, options.width, 16, 4 * options.width, 0.1, batch_first=True)
    pipe = GPipe(nn.Sequential(*(layer() for _ in range(8))), [4, 4], devices=devices, chunks=8, checkpoint=mode)
    x = torch.randn(options.rows, options.length, options.width, device=devices[0])

    def steps() -> None:
        for _ in range(options.steps):
            step(pipe, x, schedule)

    steps()
    synchronize(devices)
    start = time.perf_counter()
    steps()
    host = (time.perf_counter() - start) / options.steps
    synchronize(devices)
    done = (time.perf_counter() - start) / options.steps
    with gpipe.record() as timeline:
        most = peak(devices, lambda: step(pipe, x, schedule))
    pipe.close()
    return [f"{host * 1e3:.1f}", f"{done * 1e3:.1f}", f"{timeline.bubble:.3f}", most]


if __name__ == "__main__":
    main()
