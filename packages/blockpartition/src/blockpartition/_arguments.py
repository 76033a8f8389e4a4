"""Checks of single arguments of `place`."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias

from ._counted import counted
from ._grid import Grid, read, shown
from ._stages import Stage

InFlight: TypeAlias = Literal["1f1b", "fill_drain"] | Sequence[int]


def integer(value: Any, name: str, least: int) -> int:
    """`value` as an int that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an int, got {shown(value)} of type {type(value).__name__}")
    count = operator.index(value)
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {shown(count)}")
    return count


def switch(value: Any, name: str) -> bool:
    """`value` if it is True or False; other values that Python takes for one of them are refused."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)} of type {type(value).__name__}")
    return value


def block_count(value: Any, name: str, layers: int) -> int:
    """A number of blocks that `layers` layers can fill."""
    count = integer(value, name, 1)
    if layers == 0:
        raise ValueError("there are no layers, and each stage needs at least one")
    if count > layers:
        are = "1 layer cannot" if layers == 1 else f"{layers} layers cannot"
        raise ValueError(f"{are} fill {shown(count)} stages; use at most {layers}")
    return count


def choice(value: Any, name: str, options: Iterable[str]) -> str:
    """One of the known names."""
    known = list(options)
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {shown(value)}")
    return str(value)


def stage_list(stages: Any, layers: int) -> list[Stage]:
    """The stages as given, or that many equal ones."""
    if not isinstance(stages, Iterable):
        return [Stage()] * block_count(stages, "stages", layers)
    found = list(stages)
    for j, stage in enumerate(found):
        if not isinstance(stage, Stage):
            raise TypeError(f"stages[{j}] must be a Stage, got {stage!r} of type {type(stage).__name__}")
    block_count(len(found), "the number of stages", layers)
    return found


def speeds(stages: list[Stage]) -> Grid:
    """The speeds as integers with a common denominator."""
    grid = read([stage.speed for stage in stages], "speed of stage")
    for j, speed in enumerate(grid.units):
        if speed == 0:
            raise ValueError(f"speed of stage[{j}] must be positive, got {stages[j].speed!r}")
    return grid


def vector(values: Iterable[Any] | None, name: str, layers: int) -> Grid:
    """A number for each layer; zeros if none are given."""
    grid = read([0] * layers if values is None else values, name)
    if len(grid.units) != layers:
        raise ValueError(f"{name} has {counted(len(grid.units), 'entry')} for {counted(layers, 'layer')}")
    return grid


def transfers(values: Iterable[Any] | None, layers: int) -> Grid:
    """The cost of a cut after each layer; that after the last layer may be left out."""
    given = None if values is None else list(values)
    return vector([*given, 0] if given is not None and len(given) == layers - 1 else given, "transfer", layers)


def boundaries(values: Iterable[Any] | None, layers: int) -> Grid:
    """The size of each layer's input; that of the first layer, which is no cut, may be left out."""
    given = None if values is None else list(values)
    return vector([0, *given] if given is not None and len(given) == layers - 1 else given, "boundary", layers)


def cut_set(cuts: Iterable[Any], name: str, layers: int) -> frozenset[int]:
    """Cuts, each named by the layer right after it."""
    found = [integer(cut, f"{name}[{i}]", 1) for i, cut in enumerate(cuts)]
    for i, cut in enumerate(found):
        if cut >= layers:
            where = f"{layers} layers have cuts 1 … {layers - 1}" if layers > 1 else "1 layer has no cut"
            raise ValueError(f"{name}[{i}] is {cut}; {where}")
    return frozenset(found)


def in_flight_factors(in_flight: InFlight | None, stages: int, microbatches: int | None) -> list[int]:
    """The number of micro-batches whose activations each stage holds at the same time."""
    if in_flight is None:
        return [1] * stages
    if isinstance(in_flight, str):
        choice(in_flight, "in_flight", ["1f1b", "fill_drain"])
        return _one_forward_one_backward(stages, microbatches) if in_flight == "1f1b" else _all(stages, microbatches)
    factors = [integer(factor, f"in_flight[{j}]", 0) for j, factor in enumerate(in_flight)]
    if len(factors) != stages:
        raise ValueError(f"in_flight has {counted(len(factors), 'entry')} for {counted(stages, 'stage')}")
    return factors


def _one_forward_one_backward(stages: int, microbatches: int | None) -> list[int]:
    most = stages if microbatches is None else microbatches
    return [min(most, stages - j) for j in range(stages)]


def _all(stages: int, microbatches: int | None) -> list[int]:
    if microbatches is None:
        raise ValueError("in_flight='fill_drain' holds every micro-batch: pass their number, microbatches=…")
    return [microbatches] * stages
