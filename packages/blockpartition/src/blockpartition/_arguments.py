"""Validate individual arguments."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias

from ._numbers import Grid, read, to_list
from ._stages import Stage

InFlight: TypeAlias = Literal["1f1b", "fill_drain"] | Sequence[int]


def integer(value: Any, name: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    count = operator.index(value)
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count!r}")
    return count


def integers(values: Any, name: str, least: int) -> list[int]:
    return [integer(value, f"{name}[{i}]", least) for i, value in enumerate(to_list(values, name))]


def choice(value: Any, name: str, options: Collection[str]) -> str:
    if not isinstance(value, str) or value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")
    return value


def block_count(value: Any, name: str, layers: int) -> int:
    count = integer(value, name, 1)
    if layers == 0:
        raise ValueError("there are no layers, and each stage needs at least one")
    if count > layers:
        raise ValueError(f"{layers} layers cannot fill {count} stages; use at most {layers}")
    return count


def stage_list(stages: Any, layers: int) -> list[Stage]:
    if not isinstance(stages, Iterable):
        return [Stage()] * block_count(stages, "stages", layers)
    found = list(stages)
    for j, stage in enumerate(found):
        if not isinstance(stage, Stage):
            raise TypeError(f"stages[{j}] must be a Stage, got {stage!r} of type {type(stage).__name__}")
    block_count(len(found), "the number of stages", layers)
    return found


def vector(values: Iterable[Any] | None, name: str, layers: int, *, after: int = 0) -> Grid:
    """Read one number per layer; the last ``after`` may be omitted, and None means zeros."""
    given = [0] * layers if values is None else to_list(values, name)
    if len(given) == layers - after:
        given = given + [0] * after
    if len(given) != layers:
        raise ValueError(f"{name} must have one number per layer ({layers}), got {len(given)}")
    return read(given, name)


def cut_set(cuts: Iterable[Any], name: str, layers: int) -> frozenset[int]:
    found = frozenset(integers(cuts, name, 1))
    if wrong := [cut for cut in found if cut >= layers]:
        raise ValueError(f"{name} has the cut {wrong[0]}; cuts of {layers} layers are below {layers}")
    return found


def in_flight_factors(in_flight: InFlight | None, stages: int, microbatches: int | None) -> list[int]:
    """Return the peak number of micro-batches in flight on each stage."""
    if in_flight is None:
        return [1] * stages
    if isinstance(in_flight, str):
        if choice(in_flight, "in_flight", ["1f1b", "fill_drain"]) == "1f1b":
            return [min(microbatches or stages, stages - j) for j in range(stages)]
        if microbatches is None:
            raise ValueError("in_flight='fill_drain' holds every micro-batch: pass their number, microbatches=…")
        return [microbatches] * stages
    factors = integers(in_flight, "in_flight", 0)
    if len(factors) != stages:
        raise ValueError(f"in_flight must have one number per stage ({stages}), got {len(factors)}")
    return factors
