"""The page: on what it ran, what came of it, and the tables."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence

import torch

from .outcomes import Outcome
from .steps import ROOT

TAIL = 60
"""Lines of output of a program, or of a step that failed, that the page shows."""


def page(found: Sequence[Outcome]) -> str:
    """Markdown."""
    parts = ["# A day on GPUs", machine(), _summary(found), *map(_failures, found), *map(_output, found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def machine() -> str:
    """Versions, devices, and which of them reach each other's memory."""
    lines = [
        f"- revision {_revision()}",
        f"- Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}",
    ]
    count = torch.cuda.device_count()
    for k in range(count):
        properties = torch.cuda.get_device_properties(k)
        peers = [j for j in range(count) if j != k and torch.cuda.can_device_access_peer(k, j)]
        memory = properties.total_memory / 2**30
        lines.append(f"- cuda:{k}: {properties.name}, {memory:.0f} GiB, reaches {peers or 'no other'}")
    return "\n".join(lines if count else [*lines, "- no GPU"])


def _revision() -> str:
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def _summary(found: Sequence[Outcome]) -> str:
    rows = [f"| {each.step.title} | {each.words} | {each.seconds:.0f} |" for each in found]
    return "\n".join(["| step | outcome | seconds |", "|---|---|---:|", *rows])


def _failures(outcome: Outcome) -> str:
    if not outcome.failures:
        return ""
    lines = [f"- `{name}`: {message}" for name, message in outcome.failures.items()]
    return "\n".join([f"## Failed in {outcome.step.name}", "", *lines])


def _output(outcome: Outcome) -> str:
    """Of programs what they found; of tests only where nothing else says what went wrong."""
    if not outcome.output or (outcome.step.tests and (outcome.good or outcome.failures)):
        return ""
    lines = outcome.output.rstrip().splitlines()[-TAIL:]
    shown = lines if outcome.good and lines[0].startswith("|") else ["```", *lines, "```"]
    return "\n".join([f"## {outcome.step.title}", "", *shown])
