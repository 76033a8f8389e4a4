"""Resident memory of this process, as Linux counts it; None elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

_STATUS = Path("/proc/self/status")


def resident() -> int | None:
    return _field("VmRSS")


def peak() -> int | None:
    """The most since the process began, or since `forget_peak`. Not `ru_maxrss`: a process inherits that."""
    return _field("VmHWM")


def forget_peak() -> None:
    refs = Path("/proc/self/clear_refs")
    if refs.exists():
        refs.write_text("5")


def _field(name: str) -> int | None:
    if not _STATUS.exists():
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
