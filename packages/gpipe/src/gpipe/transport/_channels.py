"""All channels of a run: from stage to stage, into the pipeline, out of it, and for skips."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..skip import SkipLayout
from ._copy import StagePlace, carriers
from ._link import Channel
from ._ports import Port, Ports


class Channels:
    """Connects stages at ``places``.

    Args:
        channel: makes a channel, given its name and how payloads go forth and back.

    Attributes:
        entrance, exit: the channels whose other end is the owner of the run.
    """

    def __init__(self, places: Sequence[StagePlace], layout: SkipLayout, channel: Callable[..., Channel]) -> None:
        def between(a: int, b: int, what: str) -> Channel:
            name = f"{what}between partitions {a} and {b}"
            return channel(name, *carriers(places[a], places[b]))

        self.entrance = channel("at the input")
        self.exit = channel("at the output")
        self._main = [self.entrance, *(between(j, j + 1, "") for j in range(len(places) - 1)), self.exit]
        self._routes = layout.routes
        self._skips = [between(route.source, route.target, f"of skip {route.key[1]!r} ") for route in layout.routes]

    def arrival(self, j: int) -> Port | Ports:
        """Where values come into stage ``j``."""
        skips = zip(self._routes, self._skips, strict=True)
        return _port(self._main[j], [channel for route, channel in skips if route.target == j])

    def departure(self, j: int) -> Port | Ports:
        """Where values leave stage ``j``."""
        skips = zip(self._routes, self._skips, strict=True)
        return _port(self._main[j + 1], [channel for route, channel in skips if route.source == j])

    def cancel(self) -> None:
        """Let nobody wait anywhere for what will not come."""
        for channel in (*self._main, *self._skips):
            channel.cancel()


def _port(main: Channel, skips: Sequence[Channel]) -> Port | Ports:
    return Ports([main, *skips]) if skips else Port(main)
