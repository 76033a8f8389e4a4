"""The skips between partitions, with their source and target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from .namespace import Key, Namespace
from .skippable import Skippable


class Route(NamedTuple):
    """A skip from the partition that stashes it to the one that pops it."""

    key: Key
    source: int
    target: int


class SkipLayout:
    """The skips between partitions. Skips inside a partition are not included."""

    def __init__(self, routes: Iterable[Route] = ()) -> None:
        self.routes = [route for route in routes if route.source != route.target]

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Return whether the skip crosses partitions.

        Args:
            ns: the namespace of the skip.
            name: its name in the namespace.

        Returns:
            False if the skip is unknown, or the same partition stashes and pops it.
        """
        return any(route.key == (ns, name) for route in self.routes)

    def copy_policy(self, target: int) -> Iterator[tuple[int, Namespace | None, str]]:
        """Iterate over the skips that partition ``target`` pops and other partitions stash.

        Args:
            target: the index of a partition.

        Returns:
            An iterator over the index of the stashing partition, the namespace and the name of each skip.
        """
        return ((route.source, *route.key) for route in self.routes if route.target == target)


def inspect_skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """Find the skips between ``partitions``.

    Args:
        partitions: the partitions, in order.

    Returns:
        The layout of the skips, in the order in which they are stashed.
    """
    sources: dict[Key, int] = {}
    targets: dict[Key, int] = {}
    for j, partition in enumerate(partitions):
        for layer in skippables(partition):
            sources.update(dict.fromkeys(layer.stashable(), j))
            targets.update(dict.fromkeys(layer.poppable(), j))
    return SkipLayout(Route(key, source, targets[key]) for key, source in sources.items() if key in targets)


def skippables(module: nn.Module) -> Iterator[Skippable]:
    return (layer for layer in module.modules() if isinstance(layer, Skippable))
