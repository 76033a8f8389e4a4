"""The command: `python -m blockpartition 3 --costs 4 8 15 16 23 42`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from fractions import Fraction
from typing import Any

from ._arguments import block_count
from ._command import add_constraints, constraints, is_placement, numbers, stages
from ._draw import ASCII, BLOCKS, draw
from ._grid import Number
from ._partition import Partition
from ._place import place
from ._solve import partition


def main(arguments: Sequence[str] | None = None) -> None:
    """Read costs and print their partition."""
    parser = _parser()
    options = parser.parse_args(arguments)
    with _numbers_of_any_length():
        try:
            costs = numbers(sys.stdin.read() if options.costs is None else " ".join(options.costs))
            found = _solution(options, costs)
        except (TypeError, ValueError) as error:
            parser.error(str(error))
        print(_as_json(found, costs) if options.json else _as_bars(found, costs))


def run() -> None:
    """Run the command, and end quietly if the reader of its output, such as `head`, has ended."""
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout again at its exit, which would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@contextmanager
def _numbers_of_any_length() -> Iterator[None]:
    """A context without the limit on digits of ints, which protects servers from untrusted input."""
    if not hasattr(sys, "set_int_max_str_digits"):  # before Python 3.10.7 there is no limit
        yield
        return
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


def _solution(options: argparse.Namespace, costs: Sequence[Number]) -> Partition:
    """By `partition`, or by `place` where an option asks for it."""
    if not is_placement(options):
        return partition(costs, options.partitions, even=options.even or "quantile")
    block_count(options.partitions, "partitions", len(costs))
    if options.even is not None:
        raise ValueError("--even chooses among plain partitions, not among placements")
    return place(costs, stages(options), **constraints(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m blockpartition",
        usage="%(prog)s [-h] [--costs COST ...] [--even {quantile,exact}] [--json] [placement ...] partitions",
        description="Cut costs into contiguous blocks whose largest sum is the least possible.",
    )
    parser.add_argument("partitions", type=int, help="number of blocks")
    costs = "numbers such as 4, 1.5 or 2/3; read from standard input if not given"
    parser.add_argument("--costs", nargs="+", metavar="COST", help=costs)
    parser.add_argument("--even", choices=["quantile", "exact"], help="choice among the optima")
    parser.add_argument("--json", action="store_true", help="print everything that is known about the partition")
    add_constraints(parser)
    return parser


def _as_json(found: Partition, costs: Sequence[Number]) -> str:
    record = {**asdict(found), "cuts": found.cuts, "blocks": found.apply(costs)}
    return json.dumps(record, default=_plain)


def _plain(value: Any) -> str:
    """JSON has no fractions: print them as floats or text."""
    if isinstance(value, Fraction):
        return str(value)
    raise TypeError(f"no JSON for {value!r}")


def _as_bars(found: Partition, costs: Sequence[Number]) -> str:
    width = shutil.get_terminal_size().columns
    return draw(found, costs, width, BLOCKS if _can_print(BLOCKS) else ASCII)


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return False
    return True


if __name__ == "__main__":
    run()
