"""Compiled stages: gradients compared with the plain model's, and time compared with eager stages."""

from __future__ import annotations

import argparse

import torch

from gpipe import GPipe

from .common import MODES, head, mean_square, network, row, seconds, step, two_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--count", type=int, default=20)
    options = parser.parse_args()
    devices = two_devices()
    x = torch.randn(256, options.width, device=devices[0])
    plain = network(options.width).to(devices[0])
    mean_square(plain(x)).backward()
    largest = max(parameter.grad.abs().max().item() for parameter in plain.parameters())
    head("checkpoint", "schedule", "eager ms", "compiled ms", "difference / largest gradient")
    for mode in MODES:
        pipes = [GPipe(network(options.width), [4, 4], devices=devices, chunks=4, checkpoint=mode) for _ in range(2)]
        for partition in pipes[1].partitions:
            partition.compile()
        for schedule in ("fill_drain", "1f1b"):
            times = [
                seconds(lambda pipe=pipe, schedule=schedule: step(pipe, x, schedule), devices, options.count)
                for pipe in pipes
            ]
            pairs = zip(pipes[1].parameters(), plain.parameters(), strict=True)
            off = max((a.grad.to(b.device) - b.grad).abs().max().item() for a, b in pairs) / largest
            row(mode, schedule, *(f"{time * 1e3:.2f}" for time in times), f"{off:.1e}")
        for pipe in pipes:
            pipe.close()


if __name__ == "__main__":
    main()
