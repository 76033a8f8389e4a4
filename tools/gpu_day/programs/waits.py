"""Steps that must not wait for the device: each schedule and mode, where PyTorch raises at such a wait."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from torch import Tensor, nn

import gpipe
from gpipe import GPipe

from .common import MODES, SCHEDULES, head, network, row, step, synchronize, two_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inline", action="store_true", help="all stages on this thread")
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    devices, worst = two_devices(), 0
    x = torch.randn(32, options.width, device=devices[0])
    head("schedule", "checkpoint", "second step")
    for schedule in ("call", "whole", "labels", *SCHEDULES):
        for mode in MODES:
            model = nn.Sequential(*network(options.width), nn.Dropout(0.1))
            with gpipe.inline() if options.inline else nullcontext():
                pipe = GPipe(model, [4, 5], devices=devices, chunks=4, checkpoint=mode)
                found = second(pipe, x, schedule)
            row(schedule, mode, found)
            worst = max(worst, found != "does not wait")
            pipe.close()
    raise SystemExit(worst)


def second(pipe: GPipe, x: Tensor, schedule: str) -> str:
    """Return the outcome of the second step. The first one gathers facts about layers, and may synchronize."""
    once(pipe, x, schedule)
    synchronize(pipe.devices)
    if pipe.devices[0].type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        once(pipe, x, schedule)
    except RuntimeError as error:
        return str(error).partition("\n")[0].replace("|", "/")
    finally:
        if pipe.devices[0].type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            synchronize(pipe.devices)
    return "does not wait"


def once(pipe: GPipe, x: Tensor, schedule: str) -> None:
    if schedule == "call":
        pipe.zero_grad()
        pipe(x).square().mean().backward()
    elif schedule == "labels":  # with ignored labels, which must not require a synchronization
        pipe.zero_grad()
        labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        labels[:3] = -100
        pipe.step(x, labels, loss_fn=torch.nn.functional.cross_entropy)
    else:
        step(pipe, x, schedule)


if __name__ == "__main__":
    main()
