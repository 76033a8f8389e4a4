"""Command-line interface: `python -m blockpartition 3 --costs 4 8 15 16 23 42`."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict

from ._numbers import Number
from ._results import Partition
from ._solve import partition


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        words = re.split(r"[\s,\[\]]+", sys.stdin.read()) if options.costs is None else options.costs
        costs = [int(word) if re.fullmatch(r"[+-]?\d+", word) else float(word) for word in words if word]
        found = partition(costs, options.partitions, even=options.even)
        print(_as_json(found, costs) if options.json else _as_text(found))
    except (TypeError, ValueError, ArithmeticError) as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m blockpartition",
        description="Split costs into contiguous blocks, minimizing the largest block sum.",
    )
    parser.add_argument("partitions", type=int, help="number of blocks")
    parser.add_argument("--costs", nargs="+", metavar="COST", help="such as 4 or 1.5; by default from standard input")
    parser.add_argument("--even", choices=["quantile", "exact"], default="quantile", help="choice among the optima")
    parser.add_argument("--json", action="store_true", help="print everything that is known about the partition")
    return parser


def _as_json(found: Partition, costs: Sequence[Number]) -> str:
    # JSON has no fractions, so write them as text.
    return json.dumps({**asdict(found), "cuts": found.cuts, "blocks": found.apply(costs)}, default=str)


def _as_text(found: Partition) -> str:
    blocks = found.apply(range(sum(found.sizes)))
    layers = [f"{block[0]}" if len(block) == 1 else f"{block[0]}-{block[-1]}" for block in blocks]
    loads = list(map(_short, found.loads))
    left, right = max(map(len, layers)), max(map(len, loads))
    lines = [f"{name:>{left}}  {load:>{right}}" for name, load in zip(layers, loads, strict=True)]
    lines += [f"bottleneck {_short(found.bottleneck)}", f"at least {_short(found.lower_bound)} for anyone"]
    return "\n".join([*lines, f"{_short(found.imbalance)} times the mean"])


def _short(value: Number) -> str:
    return str(value) if isinstance(value, int) else f"{float(value):.6g}"


if __name__ == "__main__":
    main()
