"""Plans for a GPU: predicted seconds and bytes compared with measured ones."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor, nn

import gpipe

from .common import gpus, head, mean_square, network, row, synchronize, transformer, two_devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    devices, width = [*dict.fromkeys(two_devices())], options.width
    models = {
        "linear layers": (network(width), torch.randn(options.rows * 8, width)),
        "transformer": (transformer(width, 0.0), torch.randn(options.rows, options.length, width)),
    }
    head("model", "stages", "loss", "plan", "ms predicted", "measured", "MiB predicted", "measured", "allocator's peak")
    for name, (model, x) in models.items():
        for places, reduction in product([devices[:k] for k in range(1, 1 + len(devices))], ("mean", None)):
            stages, loss = " ".join(map(str, places)), "by micro-batch" if reduction else "once"
            row(name, stages, loss, *measured(copy.deepcopy(model), x, places, reduction))


def measured(model: nn.Module, x: Tensor, places: list[torch.device], reduction: str | None) -> list[str]:
    """Return the plan's predicted and measured time and bytes, and the peak of the GPUs' allocators with workspaces."""
    loss = {"loss_fn": mean_square, "reduction": reduction}
    plan = gpipe.plan(model, x, places, **loss, optimizer=0)
    before = sum(torch.cuda.memory_allocated(device) for device in gpus(places))
    pipe = plan.build(model)
    shown = plan.verify(x)
    for device in gpus(places):
        torch.cuda.reset_peak_memory_stats(device)
    pipe.zero_grad()
    pipe.step(x, **loss, **plan.step_arguments)
    synchronize(places)
    most = sum(torch.cuda.max_memory_allocated(device) for device in gpus(places)) - before
    pipe.close()
    return [
        str(plan).partition("\n")[0],
        f"{shown.predicted_seconds * 1e3:.2f}",
        f"{shown.seconds * 1e3:.2f}",
        mebibytes(shown.predicted_bytes),
        mebibytes(shown.bytes),
        mebibytes([most]) if gpus(places) else "–",
    ]


def mebibytes(sizes: Sequence[int]) -> str:
    return ", ".join(f"{size / 2**20:.1f}" for size in sizes)


if __name__ == "__main__":
    main()
