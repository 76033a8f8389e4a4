"""Argument validation shared by all entry points."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from numbers import Real
from typing import Any, SupportsIndex, TypeAlias

import torch
from torch import nn

import streams
from microbatch import Batch, Split, flatten, rules, scatter, unflatten, unwrap

Device: TypeAlias = torch.device | int | str


def check_no_gradient(module: nn.Module) -> None:
    """Raise ValueError if a parameter has a gradient, because the model may be in the middle of a training step."""
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            raise ValueError(
                f"module: some parameter already has gradient ({name!r}); "
                "profile before training, or call module.zero_grad() first"
            )


def check_number(name: str, value: float, *, positive: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r} ({type(value).__name__})")
    if not (0 <= value < math.inf) or (positive and not value):
        raise ValueError(f"{name}: expected a finite number {'> 0' if positive else '>= 0'}, got {value!r}")


def first_part(value: Any, chunks: int, rows: int | None, root: str) -> Batch:
    if rows is None:
        return scatter(value, chunks, root=root)[0]
    fewest = fewest_rows(value, root)
    if rows > fewest:
        raise ValueError(f"rows: expected at most {fewest}, the number of rows of the {root}, got {rows}")
    bare, spec = unwrap(value)
    leaves, tree = flatten(bare)
    for k, (leaf, rule) in enumerate(zip(leaves, rules(bare, spec), strict=True)):
        if isinstance(rule, Split) and isinstance(leaf, torch.Tensor):
            if rule.counts is not None:
                raise ValueError(f"rows: expected chunks instead, because the {root} has Split(counts=...)")
            leaves[k] = leaf.narrow(rule.dim, 0, rows * leaf.shape[rule.dim] // fewest)  # some have k rows per sample
    return Batch(unflatten(leaves, tree), (rows,))


def fewest_rows(value: Any, root: str = "sample") -> int:
    return min(scatter(value, 1, root=root)[0].rows)


def check_rows(rows: Sequence[int], chunks: int) -> list[int]:
    """Return ``rows`` in ascending order. Raise ValueError if ``chunks`` is not the default, or rows repeat."""
    if isinstance(rows, SupportsIndex):
        raise TypeError(f"rows: expected a list of numbers, got {rows!r}; write rows=[{rows!r}]")
    numbers = sorted(operator.index(number) for number in rows)
    if not numbers or numbers[0] < 1 or len(set(numbers)) < len(numbers):
        raise ValueError(f"rows: expected distinct numbers of at least 1, got {list(rows)}")
    if chunks != 1:
        raise ValueError(f"rows: expected either rows or chunks, got rows={list(rows)} and chunks={chunks}")
    return numbers


def running_device(device: Device | None) -> torch.device:
    """Return the device to run on: `device` if this machine has it, by default the accelerator, else the CPU."""
    default = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    wanted = torch.device(default if device is None else device)
    if wanted.type != "cpu" and not streams.has_streams(wanted):
        raise ValueError(
            f"device: expected the CPU or an accelerator of this machine, got {str(wanted)!r}; use device='cpu'"
        )
    return streams.get_device(streams.current_stream(wanted))  # raises if the index is too large


def sizing_device(module: nn.Module, device: Device | None) -> torch.device:
    """Return the device as `running_device` does, but allow ``meta``, the default for a module on ``meta``."""
    if device is None and any(parameter.is_meta for parameter in module.parameters()):
        device = "meta"
    is_meta = device is not None and torch.device(device).type == "meta"
    return torch.device("meta") if is_meta else running_device(device)
