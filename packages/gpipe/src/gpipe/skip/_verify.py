"""Check that every skip is stashed once and popped once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ._skippable import Skippable
from ._store import Key


def verify_skippables(module: nn.Sequential) -> None:
    """Raise TypeError unless every skip is stashed once, and popped once by a later layer.

    Args:
        module: all layers, in order.

    Raises:
        TypeError: a skip is declared twice, popped before it is stashed, or missing on one side; lists all of these.
    """
    problems = list(_problems(module))
    if problems:
        bullets = "\n".join(f"* {problem}" for problem in problems)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{bullets}")


def _problems(module: nn.Module) -> Iterator[str]:
    stashed: set[Key] = set()
    popped: set[Key] = set()
    for name, layer in module.named_modules():
        if not isinstance(layer, Skippable):
            continue
        for skip in sorted(layer.stashable_names & layer.poppable_names):
            yield f"'{name}' declared '{skip}' both as stashable and as poppable"
        for key in layer.stashable():
            if key in stashed:
                yield f"'{name}' redeclared '{key[1]}' as stashable but not isolated by namespace"
            stashed.add(key)
        for key in layer.poppable():
            if key in popped:
                yield f"'{name}' redeclared '{key[1]}' as poppable but not isolated by namespace"
            elif key not in stashed:
                yield f"'{name}' declared '{key[1]}' as poppable but it was not stashed"
            popped.add(key)
    # Sorted, since sets have another order in every process.
    for _, skip in sorted(stashed - popped, key=lambda key: key[1]):
        yield f"no module declared '{skip}' as poppable but stashed"
