"""Seconds and bytes as people read them: three digits and a unit."""

from __future__ import annotations

_TIMES = ("ns", "µs", "ms", "s")
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.00125), format_seconds(33), format_seconds(0)
    ('1.25 ms', '33.0 s', '0 s')
    """
    return _scaled(seconds * 1e9, 1000, _TIMES) if seconds else "0 s"


def format_bytes(count: float) -> str:
    """
    >>> format_bytes(1536), format_bytes(12)
    ('1.50 KiB', '12 B')
    """
    return _scaled(count, 1024, _BYTES) if abs(count) >= 1024 else f"{count:.0f} B"


def format_share(share: float) -> str:
    """
    >>> format_share(3 / 11)
    '27.3 %'
    """
    return f"{share * 100:.1f} %"


def time_unit(span: float) -> tuple[float, str]:
    """The unit in which ``span`` seconds make a number of at least one, and how many seconds it has."""
    return next((unit for unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if span >= unit[0]), (1e-9, "ns"))


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    # 999.7 would be written with four digits, as 1000.
    while abs(value) >= base - 0.5 and power < len(units) - 1:
        value /= base
        power += 1
    return f"{value:.{max(0, 3 - len(str(int(abs(value)))))}f} {units[power]}"
