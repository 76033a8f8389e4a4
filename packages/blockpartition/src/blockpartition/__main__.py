"""The command: `python -m blockpartition 3 --costs 4 8 15 16 23 42`."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from decimal import Context, Decimal
from fractions import Fraction
from itertools import accumulate, pairwise

from ._numbers import Number
from ._results import Partition
from ._solve import partition


def main(arguments: Sequence[str] | None = None) -> None:
    """Read costs and print their partition."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        costs = numbers(sys.stdin.read() if sys.stdin else "") if options.costs is None else options.costs
        found = partition(costs, options.partitions, even=options.even)
        text = _as_json(found, costs) if options.json else _as_text(found)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    print(text)


def run() -> None:
    """Run the command; its end is quiet if the reader of its output, such as `head`, has ended."""
    try:
        main()
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"python -m blockpartition: error: cannot write the result: {error}", file=sys.stderr)
        # Python flushes stdout again at its exit, which would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m blockpartition",
        description="Cut costs into contiguous blocks whose largest sum is the least possible.",
    )
    parser.add_argument("partitions", type=int, help="number of blocks")
    costs = "numbers such as 4, 1.5 or 2/3; read from standard input if not given"
    parser.add_argument("--costs", nargs="+", type=number, metavar="COST", help=costs)
    parser.add_argument("--even", choices=["quantile", "exact"], default="quantile", help="choice among the optima")
    parser.add_argument("--json", action="store_true", help="print everything that is known about the partition")
    return parser


def numbers(text: str) -> list[Number]:
    """Numbers between spaces, commas, brackets or line ends, so a JSON list will do."""
    try:
        return [number(word) for word in re.split(r"[\s,\[\]]+", text) if word]
    except argparse.ArgumentTypeError as error:
        raise ValueError(str(error)) from None


def number(word: str) -> Number:
    """An int, a float or a fraction."""
    for kind in (int, float, Fraction):
        try:
            return kind(word)
        except (ValueError, ZeroDivisionError):
            continue
    raise argparse.ArgumentTypeError(f"expected a number such as 4, 1.5 or 2/3, got {word!r}")


def _as_json(found: Partition, costs: Sequence[Number]) -> str:
    record = {**asdict(found), "cuts": found.cuts, "blocks": found.apply(costs)}
    return json.dumps(record, default=str)  # JSON has no fractions


def _as_text(found: Partition) -> str:
    """A line for each block, with its layers and its load; and what is known of the largest load."""
    spans = pairwise(accumulate(found.sizes, initial=0))
    layers = [f"{start}" if start + 1 == end else f"{start}-{end - 1}" for start, end in spans]
    loads = list(map(_short, found.loads))
    left, right = max(map(len, layers)), max(map(len, loads))
    lines = [f"{name:>{left}}  {load:>{right}}" for name, load in zip(layers, loads, strict=True)]
    lines += [f"bottleneck {_short(found.bottleneck)}", f"at least {_short(found.lower_bound)} for anyone"]
    return "\n".join([*lines, f"{_short(found.imbalance)} times the mean"])


def _short(value: Number) -> str:
    """Ints of up to 15 digits as they are, other numbers to six digits."""
    if isinstance(value, int) and value < 10**15:
        return str(value)
    try:
        return f"{float(value):.6g}"
    except OverflowError:
        exact = Fraction(value)
        return f"{Context(prec=6).divide(Decimal(exact.numerator), Decimal(exact.denominator)).normalize():g}"


if __name__ == "__main__":
    run()
