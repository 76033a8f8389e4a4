"""The channels of a run: between stages, into and out of the pipeline, and for skips."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import chain
from typing import Any, Protocol

from ..skip import SkipLayout
from ._copy import StagePlace, carriers
from ._link import Channel, Link
from ._ports import Ports


class Connect(Protocol):
    """Makes the channels of a run."""

    def end(self, name: str) -> Channel:
        """A channel whose other end is the caller."""

    def between(self, a: int, b: int, number: int, name: str) -> Channel:
        """A channel from stage ``a`` to stage ``b``. ``number`` is its number among all channels between stages."""


class Nearby:
    """Connects stages of this process.

    Args:
        places: the places of the stages, by number.
        link: the class of links.
        stall_timeout, is_cancelled: as for :class:`Link`.
    """

    def __init__(
        self,
        places: Mapping[int, StagePlace],
        link: type[Link[Any]],
        stall_timeout: float | None,
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._places = places
        self._channel = partial(Channel, link=link, stall_timeout=stall_timeout, is_cancelled=is_cancelled)

    def end(self, name: str) -> Channel:
        return self._channel(name)

    def between(self, a: int, b: int, number: int, name: str) -> Channel:
        source, target = self._places[a], self._places[b]
        on_cpu = source[0].type == target[0].type == "cpu"  # nothing is copied then
        return self._channel(name) if on_cpu else self._channel(name, *carriers(source, target))


class Channels:
    """Makes the channels of all stages.

    Args:
        stages: the stages in this process.
        count: the number of stages in all processes.
        layout: the stages between which skips go.
        connect: makes each channel.

    Attributes:
        entrance, exit: the channels between the caller and the first stage, and the last stage and the caller.
        arrivals: the channel into each stage in this process, by its number.
        departures: the channel out of each.
    """

    def __init__(self, stages: Collection[int], count: int, layout: SkipLayout, connect: Connect) -> None:
        self.entrance = connect.end("at the input")
        self.exit = connect.end("at the output")
        here = {*stages}
        self._main = {0: self.entrance, count: self.exit}
        for j in range(1, count):
            if not here.isdisjoint((j - 1, j)):
                self._main[j] = connect.between(j - 1, j, j, f"between partitions {j - 1} and {j}")
        self.arrivals: dict[int, Channel | Ports] = {j: self._main[j] for j in stages}
        self.departures: dict[int, Channel | Ports] = {j: self._main[j + 1] for j in stages}
        self._skips: list[Channel] = []
        if layout.routes:
            self._add_skips(layout, count, connect)

    def _add_skips(self, layout: SkipLayout, count: int, connect: Connect) -> None:
        """Combine the main channel of each stage that has skips with those of the skips."""
        popped: dict[int, list[Channel]] = {}
        stashed: dict[int, list[Channel]] = {}
        for number, (key, source, target) in enumerate(layout.routes, start=count):
            if source in self.departures or target in self.arrivals:
                name = f"of skip {key[1]!r} between partitions {source} and {target}"
                self._skips.append(connect.between(source, target, number, name))
                popped.setdefault(target, []).append(self._skips[-1])
                stashed.setdefault(source, []).append(self._skips[-1])
        for j in popped.keys() & self.arrivals.keys():
            self.arrivals[j] = Ports([self._main[j], *popped[j]])
        for j in stashed.keys() & self.departures.keys():
            self.departures[j] = Ports([self._main[j + 1], *stashed[j]])

    def cancel(self) -> None:
        """Cancel all present and future waits."""
        for channel in chain(self._main.values(), self._skips):
            channel.cancel()
