"""``python -m profiler package.module:build --sample 64,3,224,224``: what each layer of a model costs."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ._profile import profile
from ._table import profile_table
from .target import UnusableError, model_of, sample_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the profile that the command line asks for.

    Returns:
        The exit status: 0, or 2 if what was asked for cannot be used.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.svg is not None:
            _expect_writable(Path(options.svg))
        model, sample = model_of(options.model), sample_of(options.sample)
        if not isinstance(model, nn.Sequential):
            kind = type(model).__name__
            raise UnusableError(
                f"target: expected an nn.Sequential, got {kind}; `python -m gpipe profile` takes others"
            )
        device, chunks, timeout = torch.device(options.device), options.chunks, options.timeout
        found = profile(model, sample, device=device, chunks=chunks, timeout=timeout, progress=True)
        if options.svg is not None:
            timed = device.type != "meta"
            Path(options.svg).write_text(found.picture(by="seconds" if timed else "flops"), encoding="utf-8")
    except (UnusableError, TypeError, ValueError, RuntimeError, OSError) as error:
        print(f"profiler: {error}", file=sys.stderr)
        return 2
    # Lines are as long as they have to be where there is no terminal.
    width = shutil.get_terminal_size(fallback=(sys.maxsize, 0)).columns
    print(found.to_json() if options.json else profile_table(found, width))
    return 0


def _expect_writable(path: Path) -> None:
    """Raises before the work is done rather than after it."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UnusableError(f"svg: cannot write {str(path)!r}; expected a file in a folder that exists")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m profiler", description="What each layer of a model costs.")
    parser.add_argument("model", help="package.module:name, of an nn.Sequential or of a function that makes one")
    parser.add_argument("--sample", nargs="+", required=True, help="a shape such as 64,3,224,224 or 8,128:int64:50257")
    parser.add_argument("--device", default="cpu", help="where to measure (default: cpu)")
    parser.add_argument("--chunks", type=int, default=1, help="micro-batches the sample is cut into (default: 1)")
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds to measure for (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", help="save a picture there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
