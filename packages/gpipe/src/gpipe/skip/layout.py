"""The partitions between which skips go."""

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
        """Whether the skip goes from one partition to another.

        Args:
            ns: the namespace of the skip.
            name: its name there.

        Returns:
            False also if it is popped where it was stashed.
        """
        return any(route.key == (ns, name) for route in self.routes)

    def copy_policy(self, target: int) -> Iterator[tuple[int, Namespace | None, str]]:
        """The skips that partition ``target`` pops, and where they come from.

        Args:
            target: the index of a partition.

        Returns:
            For each of them the index of the partition that stashes it, its namespace, and its name.
        """
        return ((route.source, *route.key) for route in self.routes if route.target == target)


def inspect_skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """The skips between ``partitions``, in the order in which they are stashed.

    Args:
        partitions: the partitions, in order.

    Returns:
        The layout of the skips.
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
