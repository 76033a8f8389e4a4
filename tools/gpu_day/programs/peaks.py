"""The peak of a step against the number of micro-batches, for each schedule and mode."""

from __future__ import annotations

import argparse

import torch

from gpipe import GPipe

from .common import MODES, head, network, peak, row, step, two_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64, help="of a micro-batch")
    options = parser.parse_args()
    devices, counts = two_devices(), (2, 4, 8, 16, 32)
    head("schedule", "checkpoint", *(f"MiB, m={m}" for m in counts))
    for schedule in ("fill_drain", "1f1b", "zero_bubble"):
        for mode in MODES:
            found = []
            for m in counts:
                pipe = GPipe(network(options.width), [4, 4], devices=devices, chunks=m, checkpoint=mode)
                x = torch.randn(options.rows * m, options.width, device=devices[0])
                step(pipe, x, schedule)
                found.append(peak(devices, lambda pipe=pipe, x=x, schedule=schedule: step(pipe, x, schedule)))
                pipe.close()
            row(schedule, mode, *found)


if __name__ == "__main__":
    main()
