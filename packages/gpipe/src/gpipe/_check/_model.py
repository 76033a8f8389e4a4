"""Check the layers one by one: each gets the input that it has in the plain model, so a fault shows in its own layer
only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from ..skip._store import Key
from ._findings import Finding
from ._layer import examine
from ._runs import Task
from ._trial import Signal, popped


class Walked(NamedTuple):
    """What was found, and what the last layer gives: of the whole mini-batch, and of each micro-batch."""

    findings: list[Finding]
    whole: Signal
    parts: list[Signal]


def walk(layers: nn.Sequential, whole: Signal, parts: Sequence[Signal], tolerance: float) -> Walked:
    """Examine all ``layers``, the first of which is given ``whole``, and ``parts`` for micro-batches."""
    findings: list[Finding] = []
    signals = [whole, *parts]
    waiting: list[dict[Key, Tensor | None]] = [{} for _ in signals]
    last = next(reversed(layers))
    for name, layer in layers.named_children():
        for signal, skips in zip(signals, waiting, strict=True):
            skips.update(signal.skips)
        needed = popped(layer)
        given = [
            Signal(signal.value, {key: skips.pop(key) for key in needed if key in skips})
            for signal, skips in zip(signals, waiting, strict=True)
        ]
        found = examine(Task(name, layer, given[0], given[1:], tolerance, layer is last))
        findings += found.findings
        signals = [found.whole, *found.parts]
    return Walked(findings, signals[0], signals[1:])


def tied(layers: nn.Sequential) -> Iterator[Finding]:
    """A note for each parameter that several layers share."""
    names: dict[int, list[str]] = {}
    for name, parameter in layers.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    owners = {id(p): name for name, layer in reversed(list(layers.named_children())) for p in layer.parameters()}
    for key, shared in names.items():
        if len(shared) > 1 and len(_owning(layers, key)) > 1:
            owner = owners[key]
            kind = type(layers.get_submodule(owner)).__name__
            yield Finding("tied", owner, kind, "shares a parameter with a later layer", ", ".join(shared))


def _owning(layers: nn.Sequential, key: int) -> list[str]:
    return [name for name, layer in layers.named_children() if any(id(p) == key for p in layer.parameters())]
