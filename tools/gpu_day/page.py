"""The page: the machine, the outcomes, and the tables."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence

import torch

from .outcomes import Outcome
from .steps import PARTS, ROOT

TAIL = 80
"""Lines of output of a program, or of a step that failed, that the page shows."""


def page(part: str, found: Sequence[Outcome]) -> str:
    """Markdown."""
    title = f"# Part {part}: {PARTS[part].title.lower()}"
    parts = [title, machine(), _summary(found), *map(_failures, found), *map(_output, found)]
    return "\n\n".join(each for each in parts if each) + "\n"


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
    """Return the output of git describe, or "unknown" without a repository."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _summary(found: Sequence[Outcome]) -> str:
    rows = [f"| {each.step.title} | {each.words} | {each.seconds:.0f} |" for each in found]
    return "\n".join(["| step | outcome | seconds |", "|---|---|---:|", *rows])


def _failures(outcome: Outcome) -> str:
    if not outcome.failures:
        return ""
    return "\n".join([f"## Failed in {outcome.step.name}", "", *(f"- `{name}`" for name in outcome.failures)])


def _output(outcome: Outcome) -> str:
    """Return the tables printed by a program, or the end of the output of a failed step."""
    lines = outcome.output.strip().splitlines()
    if not lines or (outcome.step.tests and outcome.good):
        return ""
    table = [line for line in lines if line.startswith("|")]
    shown = table if outcome.good and table else ["```", *lines[-TAIL:], "```"]
    return "\n".join([f"## {outcome.step.title}", "", *shown])
