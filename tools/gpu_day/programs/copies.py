"""A first stage on the CPU and a second one on the GPU: the time of a step compared with its parts."""

from __future__ import annotations

import argparse

import torch

from gpipe import GPipe

from .common import head, network, row, seconds, step, two_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    device, cpu = two_devices()[1], torch.device("cpu")
    x = torch.randn(options.rows, options.width)
    ways = {
        "input on the device, one stage there": ([8], [device], x.to(device)),
        "input in host memory, one stage on the device": ([8], [device], x),
        "input in pinned memory, one stage on the device": (
            [8],
            [device],
            x.pin_memory() if device.type == "cuda" else x,
        ),
        "one layer on the CPU, seven on the device": ([1, 7], [cpu, device], x),
    }
    head("where", "ms a step, m=8", "ms a step, m=1")
    for name, (balance, devices, batch) in ways.items():
        found = []
        for chunks in (8, 1):
            pipe = GPipe(network(options.width), balance, devices=devices, chunks=chunks, checkpoint="never")
            time = seconds(lambda pipe=pipe, batch=batch: step(pipe, batch, "1f1b"), devices, options.count)
            found.append(f"{time * 1e3:.2f}")
            pipe.close()
        row(name, *found)
    copy = seconds(lambda: x.to(device, copy=True), [device], options.count)
    row("a copy of the input alone", f"{copy * 1e3:.2f}", "–")


if __name__ == "__main__":
    main()
