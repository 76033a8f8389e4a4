"""What a pipe keeps between forward and backward, by checkpoint mode: bytes of storages, each counted once.

    python benchmarks/activations.py --rows 256 --width 256 --chunks 8

Stages of the same size on the CPU. A dispatch mode (`profiler.Births`) sees every storage that an operation makes in
the forward, weakly; what still lives after it, but for the output, is kept for the backward. It is given in units of
the boundary tensors: the inputs of all stages but the first, whose input is the caller's own. A pipe that checkpoints
has to keep these, and beside them the whole graph of the micro-batches that it does not checkpoint. "Peak" is the most
that lives at any time until the end of the backward, gradients included.

The pipe runs inline, because a dispatch mode sees one thread; the programs are the same. Nothing here is a time.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import gpipe
from gpipe import GPipe
from profiler import Births

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
MODES = ("never", "except_last", "always")


def main() -> None:
    options = _arguments()
    boundary = (options.stages - 1) * options.rows * options.width * 4
    table = Table(
        title=f"{options.stages} stages of {options.blocks} blocks, {options.rows} rows of {options.width} numbers, "
        f"m={options.chunks}; in boundary tensors ({boundary // 1024} KiB)"
    )
    for column in ("block", "checkpoint", "kept", "beside the boundary", "peak"):
        table.add_column(column, justify="left" if column == "block" else "right")
    for name, block in MODELS.items():
        for mode in MODES:
            kept, peak = measured(block, mode, options)
            ratios = (kept / boundary, (kept - boundary) / boundary, peak / boundary)
            table.add_row(name, mode, *(f"{ratio:.2f}" for ratio in ratios))
    console = Console(width=120)
    console.print(table)
    console.print(f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}")


def measured(block: Callable[[int], list[nn.Module]], mode: str, options: argparse.Namespace) -> tuple[int, int]:
    """Bytes kept between forward and backward, and the most at any time."""
    layers = [layer for _ in range(options.stages * options.blocks) for layer in block(options.width)]
    balance = [len(layers) // options.stages] * options.stages
    pipe = GPipe(
        nn.Sequential(*layers), balance, devices=["cpu"] * options.stages, chunks=options.chunks, checkpoint=mode
    )
    x = torch.randn(options.rows, options.width)
    with gpipe.inline():
        pipe(x).sum().backward()  # gradients and all that is made once
        with Births() as births:
            output = pipe(x)
            kept = births.alive() - output.untyped_storage().nbytes()
            output.sum().backward()
    return kept, births.peak


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    main()
