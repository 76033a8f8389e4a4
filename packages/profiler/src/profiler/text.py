"""Format reports: numbers with three digits and a unit, and aligned tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["align", "format_bytes", "format_cost", "format_flops", "format_seconds", "format_share"]

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_TIMES = ("ns", "µs", "ms", "s")
_LONGEST = 1e9
"""The bound above which numbers are written with an exponent, in the largest unit."""


def format_bytes(count: float) -> str:
    """Format bytes with a suitable unit.

    Args:
        count: the number of bytes.

    Returns:
        Three digits and a unit that is a power of 1024.

    >>> format_bytes(1536), format_bytes(12)
    ('1.50 KiB', '12 B')
    """
    return _scale(count, 1024, _BINARY)


def format_flops(count: float) -> str:
    """Format operations with a suitable prefix.

    Args:
        count: the number of operations.

    Returns:
        Three digits and the prefix of a power of 1000.

    >>> format_flops(2_000_000)
    '2.00 M'
    """
    return _scale(count, 1000, _DECIMAL).strip()


def format_seconds(seconds: float) -> str:
    """Format a time with a suitable unit.

    Args:
        seconds: the time in seconds.

    Returns:
        Three digits and a unit from ns to s.

    >>> format_seconds(0.00125), format_seconds(33), format_seconds(0)
    ('1.25 ms', '33.0 s', '0 s')
    """
    if not seconds:
        return "0 s"
    # Start from seconds, because nanoseconds could overflow a float.
    return _scale(seconds, 1000, _TIMES, power=3) if seconds >= 1 else _scale(seconds * 1e9, 1000, _TIMES)


def format_share(share: float) -> str:
    """Format a fraction as a percentage.

    Args:
        share: the fraction; 1 is 100 %.

    Returns:
        Percent with one decimal.

    >>> format_share(3 / 11)
    '27.3 %'
    """
    return f"{share * 100:.1f} %"


def format_cost(value: float, by: str) -> str:
    """Format the cost ``by`` with a unit.

    Args:
        value: the value in bytes, seconds or operations.
        by: the name of the cost. Its suffix ``bytes`` or ``seconds`` selects the unit; without one, it is operations.

    Returns:
        Three digits and a unit.

    >>> format_cost(1536, "saved_bytes")
    '1.50 KiB'
    """
    if by.endswith("bytes"):
        return format_bytes(value)
    return format_seconds(value) if by.endswith("seconds") else format_flops(value)


def align(rows: Sequence[Sequence[str]], left: int) -> str:
    """Format a table: columns two spaces apart, and a line below the head.

    Args:
        rows: the head and the lines, each with the same number of cells.
        left: the number of columns that are aligned left; the remaining columns are aligned right.

    Returns:
        The lines, joined.

    Raises:
        ValueError: rows have different lengths.

    >>> print(align([["name", "size"], ["a", "12 B"]], left=1))
    name  size
    ──────────
    a     12 B
    """
    columns = [[_printable(cell) for cell in column] for column in zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    sides = [str.ljust if k < left else str.rjust for k in range(len(columns))]
    padded = [
        [side(cell, width) for cell in column] for side, width, column in zip(sides, widths, columns, strict=True)
    ]
    head, *body = ("  ".join(row).rstrip() for row in zip(*padded, strict=True))
    return "\n".join([head, "─" * (sum(widths) + 2 * len(widths) - 2), *body])


def _printable(cell: str) -> str:
    """Escape lone surrogates and other unprintable characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cell)


def _scale(value: float, base: int, units: tuple[str, ...], power: int = 0) -> str:
    """Format ``value``, which is in ``units[power]``, in the first unit that makes it less than ``base``."""
    # Numbers such as 999.7 would round to four digits, 1000.
    while abs(value) >= base - 0.5 and power < len(units) - 1:
        value /= base
        power += 1
    if not abs(value) < _LONGEST:
        return f"{value:.3g} {units[power]}"
    digits = 0 if power == 0 and value == int(value) else max(0, 3 - len(str(int(abs(value)))))
    return f"{value:.{digits}f} {units[power]}"
