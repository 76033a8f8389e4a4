"""The command line: ``python -m tools.gpu_day [FOLDER]``, from the root of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from .outcomes import outcomes
from .page import page
from .steps import STEPS


def main() -> None:
    folder = Path(sys.argv[1] if sys.argv[1:] else "gpu-day").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for outcome in outcomes(STEPS, folder, gpu=torch.cuda.is_available()):
        found.append(outcome)
        print(f"{outcome.step.name}: {outcome.words} ({outcome.seconds:.0f} s)", flush=True)
        # After each step, so that a machine that is taken away leaves what was found.
        (folder / "page.md").write_text(page(found), encoding="utf-8")
    sys.exit(not all(outcome.good for outcome in found))


main()
