"""A partition as bars: a line for each block, as long as its load, shaded by layer."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, cycle, pairwise

from ._grid import Number
from ._partition import Partition

BLOCKS = "█▓"
ASCII = "#="


def draw(partition: Partition, costs: Sequence[Number], width: int = 80, shades: str = BLOCKS) -> str:
    """The bars, the longest of them the bottleneck, and a line that says how good that is; `width` is for all of it."""
    ends = list(accumulate(partition.sizes, initial=0))
    labels = _aligned(
        [
            (f"{start}" if start + 1 == end else f"{start}-{end - 1}", _short(load))
            for (start, end), load in zip(pairwise(ends), partition.loads, strict=True)
        ]
    )
    room = max(1, width - max(map(len, labels)) - 2)
    largest = Fraction(max(partition.loads)) or Fraction(1)
    bars = [_bar(costs[start:end], room / largest, shades) for start, end in pairwise(ends)]
    lines = [f"{label}  {bar}".rstrip() for label, bar in zip(labels, bars, strict=True)]
    return "\n".join([*lines, _summary(partition)])


def _bar(costs: Sequence[Number], scale: Fraction, shades: str) -> str:
    """A run of characters for each layer: rounding the sums, not the costs, keeps the length right."""
    ends = [round(scale * total) for total in accumulate((Fraction(cost) for cost in costs), initial=Fraction(0))]
    return "".join(shade * (end - start) for shade, (start, end) in zip(cycle(shades), pairwise(ends), strict=False))


def _summary(partition: Partition) -> str:
    return (
        f"bottleneck {_short(partition.bottleneck)}, at least {_short(partition.lower_bound)} for anyone; "
        f"{_short(partition.imbalance)} times the mean"
    )


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    layers, loads = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [f"{layer:>{layers}}  {load:>{loads}}" for layer, load in rows]


def _short(value: Number) -> str:
    try:
        return str(value) if isinstance(value, int) else f"{float(value):.6g}"
    except OverflowError:
        return str(value)
