"""A partition as bars: a line for each block, as long as its load, shaded by layer."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, cycle, pairwise, zip_longest

from ._grid import Number
from ._partition import Partition, Placement

BLOCKS = "█▓"
ASCII = "#="


def draw(partition: Partition, costs: Sequence[Number], width: int = 80, shades: str = BLOCKS) -> str:
    """A bar for each block, and a line about the bottleneck; no line is longer than `width`.

    The bars of a placement are times, and their labels say the stage's mode too.
    """
    ends = list(accumulate(partition.sizes, initial=0))
    lengths = [Fraction(x) for x in (partition.times if isinstance(partition, Placement) else partition.loads)]
    labels = _aligned([_label(partition, j, start, end) for j, (start, end) in enumerate(pairwise(ends))])
    room = max(1, width - max(map(len, labels)) - 2)
    scale = room / (max(lengths) or Fraction(1))
    bars = [
        _bar(costs[start:end], scale * length, shades)
        for length, (start, end) in zip(lengths, pairwise(ends), strict=True)
    ]
    lines = [f"{label}  {bar}".rstrip() for label, bar in zip(labels, bars, strict=True)]
    return "\n".join([*lines, _summary(partition)])


def _label(partition: Partition, j: int, start: int, end: int) -> list[str]:
    layers = f"{start}" if start + 1 == end else f"{start}-{end - 1}"
    if not isinstance(partition, Placement):
        return [layers, _short(partition.loads[j])]
    mode = partition.modes[j]
    return [f"stage {partition.order[j]}", layers, _short(partition.times[j]), *([] if mode is None else [mode])]


def _bar(costs: Sequence[Number], length: Fraction, shades: str) -> str:
    """A run of characters for each layer: rounding the sums, not the costs, keeps the length right."""
    sums = list(accumulate((Fraction(cost) for cost in costs), initial=Fraction(0)))
    ends = [round(length * total / (sums[-1] or 1)) for total in sums]
    return "".join(shade * (end - start) for shade, (start, end) in zip(cycle(shades), pairwise(ends), strict=False))


def _summary(partition: Partition) -> str:
    return (
        f"bottleneck {_short(partition.bottleneck)}, at least {_short(partition.lower_bound)} for anyone; "
        f"{_short(partition.imbalance)} times the mean"
    )


def _aligned(rows: list[list[str]]) -> list[str]:
    """Columns of equal width; the rows may differ in number."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    return ["  ".join(f"{word:>{width}}" for word, width in zip_longest(row, widths, fillvalue="")) for row in rows]


def _short(value: Number) -> str:
    try:
        return str(value) if isinstance(value, int) else f"{float(value):.6g}"
    except OverflowError:
        return str(value)
