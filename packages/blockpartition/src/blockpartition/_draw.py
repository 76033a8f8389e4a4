"""A partition as bars: a line for each block, as long as its load, shaded by layer."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from decimal import Context, Decimal
from fractions import Fraction
from itertools import accumulate, cycle, pairwise

from ._numbers import Number
from ._results import Partition

BLOCKS = "█▓"
ASCII = "#="


def draw(partition: Partition, costs: Sequence[Number], width: int = 80, shades: str = BLOCKS) -> str:
    """A bar for each block, and a sentence about the bottleneck, in lines of `width` if labels leave room."""
    spans = list(pairwise(accumulate(partition.sizes, initial=0)))
    lengths = [Fraction(load) for load in partition.loads]
    layers = [f"{start}" if start + 1 == end else f"{start}-{end - 1}" for start, end in spans]
    labels = list(map("  ".join, zip(_aligned(layers), _aligned(list(map(_short, partition.loads))), strict=True)))
    scale = max(1, width - max(map(len, labels)) - 2) / (max(lengths) or Fraction(1))
    bars = [_bar(costs[start:end], scale * length, shades) for length, (start, end) in zip(lengths, spans, strict=True)]
    summary = (
        f"bottleneck {_short(partition.bottleneck)}, at least {_short(partition.lower_bound)} for anyone; "
        f"{_short(partition.imbalance)} times the mean"
    )
    lines = [f"{label}  {bar}".rstrip() for label, bar in zip(labels, bars, strict=True)]
    return "\n".join([*lines, *textwrap.wrap(summary, max(1, width))])


def _bar(costs: Sequence[Number], length: Fraction, shades: str) -> str:
    """A run of characters for each layer: rounding the sums, not the costs, keeps the length right."""
    sums = list(accumulate((Fraction(cost) for cost in costs), initial=Fraction(0)))
    ends = [round(length * total / (sums[-1] or 1)) for total in sums]
    return "".join(shade * (end - start) for shade, (start, end) in zip(cycle(shades), pairwise(ends), strict=False))


def _aligned(words: list[str]) -> list[str]:
    width = max(map(len, words))
    return [word.rjust(width) for word in words]


def _short(value: Number) -> str:
    """Ints of up to 15 digits as they are, other numbers to six digits."""
    if isinstance(value, int) and value < 10**15:
        return str(value)
    try:
        return f"{float(value):.6g}"
    except OverflowError:
        exact = Fraction(value)
        return f"{Context(prec=6).divide(Decimal(exact.numerator), Decimal(exact.denominator)).normalize():g}"
