"""What a figure was measured on: the machine, the versions, the day."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from datetime import date
from pathlib import Path

DISTRIBUTIONS = ("torch", "torchgpipe", "fairscale", "transformers")


def stamp(command: str) -> str:
    """One line that says where, when, with what, and how to measure again."""
    where = f"{processor()}, {_cores()} cores, {platform.system()}"
    return f"{date.today()}; {where}; {_versions()}; `{command}`"


def processor() -> str:
    """The processor's own name, which `platform.processor()` does not know on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return name[1].strip() if name else platform.processor() or platform.machine()


def installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cores() -> int:
    """How many this process may use, which in a container may be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions() -> str:
    found = [f"{name} {importlib.metadata.version(name)}" for name in DISTRIBUTIONS if installed(name)]
    return ", ".join([*found, f"Python {platform.python_version()}"])
