"""What it takes to plan a model like Llama 70B without data, for devices that are not there.

python -m benchmarks.large_plan 8x80GB sgd        # one line of JSON, from a process of its own
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

import gpipe

from .many_devices import TOKENS, model
from .report import Report, Table

ROWS = 64
CASES = (("8x80GB", "adam"), ("8x80GB", "sgd"), ("16x80GB", "adam"), ("8x8x80GB", "adam"))
Figures = dict[str, float | str]


def large(quick: bool) -> Report:
    """Seconds of a processor and resident memory of a process that imports torch, makes the model, and plans."""
    caption = f"A model like Llama 70B on meta, {ROWS} rows of {TOKENS} tokens: a process that does nothing but plan"
    table = Table("plan.md", "large", caption, ("devices", "optimizer", "found", "seconds", "peak memory"), left=3)
    figures = {}
    for devices, optimizer in CASES[:1] if quick else CASES:
        found = measured(devices, optimizer)
        seconds, memory = float(found["seconds"]), float(found["bytes"])
        table.add(devices, optimizer, found["found"], f"{seconds:.0f}", f"{memory / 1e9:.2f} GB")
        figures |= {f"plan, Llama 70B {devices} {optimizer}: seconds": seconds}
        figures |= {f"plan, Llama 70B {devices} {optimizer}: bytes": memory}
    return Report([table], figures)


def measured(devices: str, optimizer: str) -> Figures:
    """What the process says of itself."""
    command = [sys.executable, "-m", "benchmarks.large_plan", devices, optimizer]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=900, check=True
    )
    found: Figures = json.loads(ended.stdout)
    return found


def _plan(devices: str, optimizer: str) -> str:
    sample = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    try:
        plan = gpipe.plan(model(), sample, devices, optimizer=optimizer)
    except gpipe.Infeasible as error:
        return f"does not fit: needs {error.changes[-1].partition(' (')[2].rstrip(')')}"
    return f"{plan.replicas} × {len(plan.balance)} × {plan.chunks}, {plan.schedule}"


def main() -> None:
    found = _plan(sys.argv[1], sys.argv[2])
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"found": found, "seconds": time.process_time(), "bytes": peak}))


if __name__ == "__main__":
    main()
