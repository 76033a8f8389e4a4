"""The launch rate of one process: forwards and backwards per second of several threads, engine time per cell."""

from __future__ import annotations

import argparse
import threading
import time
from contextlib import nullcontext

import torch
from torch import nn

import gpipe
from gpipe import GPipe

from .common import head, network, row, seconds, step, synchronize, two_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--count", type=int, default=20, help="steps of the engine")
    options = parser.parse_args()
    device = two_devices()[0]
    head("what", "how", "found")
    alone = 0.0
    for width in (64, 1024):
        for threads in (1, 2, 4, 8):
            found = passes(threads, width, device, options.seconds)
            alone = found if threads == 1 else alone
            row(
                f"forwards and backwards of 8 layers of width {width}",
                f"{threads} threads",
                f"{found:.0f}/s, × {found / alone:.2f}",
            )
    for stages in (2, 4):
        for way in ("workers", "inline"):
            with gpipe.inline() if way == "inline" else nullcontext():
                row(
                    f"µs a cell, {stages} empty stages, 64 micro-batches",
                    way,
                    f"{cell(stages, device, options.count):.1f}",
                )


def passes(threads: int, width: int, device: torch.device, duration: float) -> float:
    """Return forwards and backwards per second of all ``threads``, each with its own model and stream."""
    meeting, counts = threading.Barrier(threads + 1), [0] * threads
    end = threading.Event()

    def run(k: int) -> None:
        model, x = network(width).to(device), torch.randn(4, width, device=device)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with torch.autograd.set_multithreading_enabled(False), torch.cuda.stream(stream):
            model(x).sum().backward()
            meeting.wait()
            while not end.is_set():
                model(x).sum().backward()
                counts[k] += 1

    workers = [threading.Thread(target=run, args=(k,)) for k in range(threads)]
    for worker in workers:
        worker.start()
    meeting.wait()
    start = time.perf_counter()
    end.wait(duration)
    end.set()
    for worker in workers:
        worker.join()
    synchronize([device])
    return sum(counts) / (time.perf_counter() - start)


def cell(stages: int, device: torch.device, count: int) -> float:
    """µs of a forward or a backward of one micro-batch in a stage that does nothing."""
    layers = [nn.Identity() for _ in range(stages)]
    pipe = GPipe(nn.Sequential(*layers), [1] * stages, devices=[device] * stages, chunks=64, checkpoint="never")
    x = torch.randn(64, 1, device=device, requires_grad=True)
    found = seconds(lambda: step(pipe, x, "1f1b"), [device], count) / (2 * 64 * stages) * 1e6
    pipe.close()
    return found


if __name__ == "__main__":
    main()
