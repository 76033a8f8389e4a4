"""The options of the command for placements, and the parsing of numbers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from ._grid import Number
from ._stages import Mode, Stage

_VECTORS = {
    "memory": "what each layer needs once",
    "activations": "what each layer needs for each micro-batch in flight",
    "boundary": "what enters each layer for a micro-batch, kept at the start of a stage",
    "transfer": "cost of a cut after each layer, in time",
}


def add_constraints(parser: argparse.ArgumentParser) -> None:
    """The arguments of `place`."""
    group = parser.add_argument_group("placement", "on stages with constraints; see `blockpartition.place`")
    group.add_argument("--speed", nargs="+", metavar="SPEED", help="of each stage, or one for all")
    group.add_argument(
        "--capacity", nargs="+", metavar="MEMORY", help="of each stage, or one for all; '-' for any amount"
    )
    for name, meaning in _VECTORS.items():
        group.add_argument(f"--{name}", nargs="+", metavar="NUMBER", help=meaning)
    mode = "a way to run a block: NAME[:time=1,saved=1,boundary=1,transient=0]; once for each, the preferred first"
    group.add_argument("--mode", action="append", metavar="MODE", help=mode)
    group.add_argument(
        "--in-flight", nargs="+", metavar="COUNT", help="'1f1b', 'fill_drain', or a number for each stage"
    )
    group.add_argument("--overlap", action="store_true", default=None, help="stages transfer while they compute")
    group.add_argument("--forbid", nargs="+", type=int, metavar="LAYER", help="layers before which no cut may be")
    group.add_argument("--pin", nargs="+", type=int, metavar="LAYER", help="layers before which a cut has to be")
    group.add_argument("--order", choices=["fixed", "free"], help="'free' also chooses which stage comes where")
    group.add_argument("--microbatches", type=int, metavar="COUNT", help="how many there are")
    group.add_argument("--objective", choices=["bottleneck", "makespan"], help="what is to be least")
    group.add_argument("--gap", metavar="NUMBER", help="how far above the least a makespan may be, relative to it")


def is_placement(options: argparse.Namespace) -> bool:
    """Whether any of these options is given."""
    return any(getattr(options, name) is not None for name in [*_CONSTRAINTS, "speed", "capacity", "mode"])


def stages(options: argparse.Namespace) -> list[Stage]:
    """The stages, one for each partition."""
    count = options.partitions
    modes = [_mode(text) for text in options.mode or []]
    speeds = _each(options.speed or ["1"], count, "--speed")
    capacities = _each(options.capacity or ["-"], count, "--capacity")
    return [
        Stage(_number(speed), None if capacity == "-" else _number(capacity), modes)
        for speed, capacity in zip(speeds, capacities, strict=True)
    ]


def constraints(options: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `place` that were given."""
    given = {name: getattr(options, name) for name in _CONSTRAINTS}
    return {name: _CONSTRAINTS[name](value) for name, value in given.items() if value is not None}


def numbers(text: str) -> list[Number]:
    """Numbers between spaces, commas, brackets or line ends, so a JSON list will do."""
    return [_number(word) for word in re.split(r"[\s,\[\]]+", text) if word]


def _each(words: list[str], count: int, option: str) -> list[str]:
    if len(words) not in (1, count):
        raise ValueError(f"{option} has {len(words)} values for {count} stages; give one for each, or one for all")
    return words * count if len(words) == 1 else words


def _mode(text: str) -> Mode:
    name, _, settings = text.partition(":")
    pairs = [setting.partition("=") for setting in settings.split(",") if setting]
    if "=" in name:
        raise ValueError(f"expected a mode such as recompute:time=4/3,saved=0,transient=1, got {text!r}")
    for key, equals, _value in pairs:
        if not equals or key not in ("time", "saved", "boundary", "transient"):
            raise ValueError(f"expected a mode such as recompute:time=4/3,saved=0,transient=1, got {text!r}")
    return Mode(name, **{key: _number(value) for key, _, value in pairs})


def _in_flight(words: list[str]) -> str | list[int]:
    if words[0] in ("1f1b", "fill_drain"):
        return words[0]
    try:
        return [int(word) for word in words]
    except ValueError:
        raise ValueError(f"--in-flight must be '1f1b', 'fill_drain' or numbers, got {' '.join(words)!r}") from None


def _number(word: str) -> Number:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:  # no number of this kind; the last kind, a fraction, raises the error
            continue
    return _fraction(word)


def _fraction(word: str) -> Fraction:
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"expected a number such as 4, 1.5 or 2/3, got {word!r}") from None


def _numbers(words: Sequence[str]) -> list[Number]:
    return numbers(" ".join(words))


def _same(value: Any) -> Any:
    return value


_CONSTRAINTS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(_VECTORS, _numbers),
    "in_flight": _in_flight,
    **dict.fromkeys(("overlap", "forbid", "pin", "order", "microbatches", "objective"), _same),
    "gap": _number,
}
