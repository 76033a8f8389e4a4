"""The host's available memory, checked before parameters or gradients are put there."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/")


def expect_host_memory(needed: int, what: str) -> None:
    """Raise MemoryError if the host has less than ``needed`` bytes for ``what``; nothing is checked except on Linux."""
    available = available_bytes()
    if available is not None and needed > available:
        from profiler.text import format_bytes  # imported here, because training loops do not need it

        raise MemoryError(
            f"offload=True keeps {what} in the host's memory, which needs {format_bytes(needed)}, but "
            f"{format_bytes(available)} are available; use a machine with more memory, a smaller dtype, or fewer "
            "trained parameters, such as adapters"
        )


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return the bytes that this process can still allocate without swapping; None if the system does not tell.

    Args:
        root: the folder with ``proc`` and ``sys``.
    """
    of_machine = _numbers_by_name(root / "proc/meminfo").get("MemAvailable:")
    if of_machine is None:
        return None
    return max(0, min([of_machine * 1024, *_left_of_limits(root / "sys/fs/cgroup")]))


def _left_of_limits(folder: Path) -> list[int]:
    """Return the bytes left below the limits of the control group, such as a container's, without cached files."""
    found = []
    for limit, usage, cached, stat in (
        ("memory.max", "memory.current", "inactive_file", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file", "memory/memory.stat"),
    ):
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None:
            found.append(most - used + _numbers_by_name(folder / stat).get(cached, 0))
    return found


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _numbers_by_name(file: Path) -> dict[str, int]:
    """Return the lines of ``file``, each a name and a number."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
