"""The transport of a run: a channel between each two neighbouring stages, to and from the caller, and for each skip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..skip import SkipLayout
from ._copy import StagePlace, carriers
from ._link import AnyChannel, Channel, Link, OuterChannel, Ports, stall_seconds


class Transport:
    """The channels of one run, for the stages of this process.

    Args:
        places: the places of these stages, by number.
        count: the number of stages in all processes.
        remote: the channel of a number, if one of its ends is in another process.

    Attributes:
        entrance, exit: the channels between the caller and the first stage, and the last stage and the caller.
        arrivals, departures: the channel into, and out of, each stage of this process, by its number.
    """

    def __init__(
        self,
        places: Mapping[int, StagePlace],
        count: int,
        layout: SkipLayout,
        link: type[Link[Any]] = Link,
        is_cancelled: Callable[[], bool] = lambda: True,
        remote: Callable[[int], Channel | None] = lambda number: None,
    ) -> None:
        self._places = places
        self._remote = remote
        self._link = partial(link, stall_timeout=stall_seconds(), is_cancelled=is_cancelled)
        self._inner: list[Channel] = []
        self.entrance, self.exit = OuterChannel(), OuterChannel()
        main: dict[int, AnyChannel] = {0: self.entrance, count: self.exit}
        for j in range(1, count):
            # A process has channels where one end at least is a stage of its own.
            if not places.keys().isdisjoint((j - 1, j)):
                main[j] = self.between(j - 1, j, j, f"between partitions {j - 1} and {j}")
        self.arrivals: dict[int, AnyChannel] = {j: main[j] for j in places}
        self.departures: dict[int, AnyChannel] = {j: main[j + 1] for j in places}
        if layout.routes:
            self._add_skips(layout, count)

    def between(self, a: int, b: int, number: int, name: str) -> Channel:
        """A new channel from stage ``a`` to stage ``b``, with its ``number`` among all channels between stages."""
        channel = self._remote(number)
        if channel is None:
            forth, back = carriers(self._places[a], self._places[b])
            channel = Channel(self._link(f"values {name}", forth), self._link(f"gradients {name}", back))
        self._inner.append(channel)
        return channel

    def _add_skips(self, layout: SkipLayout, count: int) -> None:
        popped: dict[int, list[AnyChannel]] = {j: [main] for j, main in self.arrivals.items()}
        stashed: dict[int, list[AnyChannel]] = {j: [main] for j, main in self.departures.items()}
        # Every process gives a skip the same number, also if it has neither end of it.
        for number, (key, source, target) in enumerate(layout.routes, start=count):
            if source in self._places or target in self._places:
                skip = self.between(
                    source, target, number, f"of skip {key[1]!r} between partitions {source} and {target}"
                )
                popped.setdefault(target, []).append(skip)
                stashed.setdefault(source, []).append(skip)
        self.arrivals |= {j: Ports(popped[j]) for j in self.arrivals if len(popped[j]) > 1}
        self.departures |= {j: Ports(stashed[j]) for j in self.departures if len(stashed[j]) > 1}

    def cancel(self) -> None:
        # Not those at both ends, where nobody waits.
        for channel in self._inner:
            channel.cancel()
