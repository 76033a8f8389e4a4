"""Numbers as people read them: three digits and a unit."""

from __future__ import annotations

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
DECIMAL = ("", "k", "M", "G", "T", "P", "E")
TIMES = ("ns", "µs", "ms", "s")


def format_bytes(count: float) -> str:
    """
    >>> format_bytes(1536)
    '1.50 KiB'
    """
    return _scaled(count, 1024, BINARY)


def format_flops(count: float) -> str:
    """
    >>> format_flops(2_000_000)
    '2.00 M'
    """
    return _scaled(count, 1000, DECIMAL).strip()


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.00125)
    '1.25 ms'
    """
    return _scaled(seconds * 1e9, 1000, TIMES)


def format_cost(value: float, by: str) -> str:
    """In the unit of the figure named `by`."""
    if by.endswith("bytes"):
        return format_bytes(value)
    return format_seconds(value) if by.endswith("seconds") else format_flops(value)


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    """`value`, a number of the first unit, in the unit that leaves it less than `base`, if there is one."""
    power = 0
    while abs(value) >= base and power < len(units) - 1:
        value /= base
        power += 1
    digits = 0 if power == 0 and value == int(value) else max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits}f} {units[power]}"
