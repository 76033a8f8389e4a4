"""All channels of a run: from stage to stage, into the pipeline, out of it, and for skips."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..skip import SkipLayout
from ._copy import StagePlace, carriers
from ._link import Channel
from ._ports import Ports


class Channels:
    """Connects stages at ``places``.

    Args:
        channel: makes a channel, given its name and how payloads go forth and back.

    Attributes:
        entrance, exit: the channels whose other end is the owner of the run.
        arrivals: where values come into each stage.
        departures: where they leave it.
    """

    def __init__(self, places: Sequence[StagePlace], layout: SkipLayout, channel: Callable[..., Channel]) -> None:
        def between(a: int, b: int, what: str) -> Channel:
            name = f"{what}between partitions {a} and {b}"
            on_cpu = places[a][0].type == places[b][0].type == "cpu"  # where nothing is copied
            return channel(name) if on_cpu else channel(name, *carriers(places[a], places[b]))

        self.entrance = channel("at the input")
        self.exit = channel("at the output")
        self._main = [self.entrance, *[between(j, j + 1, "") for j in range(len(places) - 1)], self.exit]
        self._skips: list[Channel] = []
        self.arrivals: list[Channel | Ports] = [*self._main[:-1]]
        self.departures: list[Channel | Ports] = [*self._main[1:]]
        if layout.routes:
            self._skips = [between(route.source, route.target, f"of skip {route.key[1]!r} ") for route in layout.routes]
            self._add_ports(layout)

    def _add_ports(self, layout: SkipLayout) -> None:
        """Let skips come and go beside the main channel, where stages have any."""
        routed = list(zip(layout.routes, self._skips, strict=True))
        for j in {route.target for route in layout.routes}:
            popped = [channel for route, channel in routed if route.target == j]
            self.arrivals[j] = Ports([self._main[j], *popped])
        for j in {route.source for route in layout.routes}:
            stashed = [channel for route, channel in routed if route.source == j]
            self.departures[j] = Ports([self._main[j + 1], *stashed])

    def cancel(self) -> None:
        """Cancel what anybody waits for, and will wait for."""
        for channel in (*self._main, *self._skips):
            channel.cancel()
