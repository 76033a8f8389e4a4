"""The command line: ``python -m tools.gpu_day A|B|C|D|E [FOLDER]``, from the root of the repository."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from .outcomes import outcomes
from .page import page
from .steps import PARTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="gpu_day", description=__doc__)
    parser.add_argument("part", choices=sorted(PARTS))
    parser.add_argument("folder", nargs="?", type=Path, default=Path("gpu-day"))
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for outcome in outcomes(PARTS[options.part], folder / "log.txt", gpu=torch.cuda.is_available()):
        found.append(outcome)
        print(f"{outcome.step.name}: {outcome.words} ({outcome.seconds:.0f} s)", flush=True)
        # After each step, so that a machine that is taken away leaves what was found.
        (folder / "page.md").write_text(page(options.part, found), encoding="utf-8")
    sys.exit(not all(outcome.good for outcome in found))


main()
