"""Which channel leads from where to where."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.skip._layout import Route, SkipLayout
from gpipe.transport._copy import CopyStreams
from gpipe.transport._link import Channel
from gpipe.transport._ports import Ports
from gpipe.transport._transport import Transport
from gpipe.values._describe import Cancelled
from streams import CPUStream

PLACE = torch.device("cpu"), CPUStream, CopyStreams.on(torch.device("cpu"))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, SkipLayout]:
    """How many stages, and skips between some of them."""
    stages = draw(st.integers(1, 5))
    pairs = draw(st.lists(st.tuples(*[st.integers(0, stages - 1)] * 2).map(sorted), max_size=4))
    return stages, SkipLayout(Route((None, f"skip {n}"), a, b) for n, (a, b) in enumerate(pairs))


class Making(Transport):
    """Keeps a list of the channels that it makes."""

    def __init__(self, here: Iterable[int], stages: int, layout: SkipLayout) -> None:
        self.made: list[Channel] = []
        self.between_stages: dict[int, tuple[int, int]] = {}
        super().__init__(dict.fromkeys(here, PLACE), stages, layout)
        self.made += [self.entrance, self.exit]

    def between(self, a: int, b: int, number: int, name: str) -> Channel:
        assert number not in self.between_stages
        self.between_stages[number] = a, b
        self.made.append(Channel(name))
        return self.made[-1]


def connected(stages: int, layout: SkipLayout) -> tuple[Transport, list[Channel]]:
    """The channels, and a list of all that were made."""
    making = Making(range(stages), stages, layout)
    return making, making.made


@given(layouts(), st.sets(st.integers(0, 4)))
def test_some_stages_have_the_channels_that_they_need_under_the_same_numbers(
    case: tuple[int, SkipLayout], chosen: set[int]
):
    stages, layout = case
    here = sorted(chosen & {*range(stages)})
    whole, part = Making(range(stages), stages, layout), Making(here, stages, layout)
    assert list(part.arrivals) == list(part.departures) == here
    assert part.between_stages == {
        number: ends for number, ends in whole.between_stages.items() if not {*ends}.isdisjoint(here)
    }


def main(side: Channel | Ports) -> Channel:
    return side._channels[0] if isinstance(side, Ports) else side


def skips(side: Channel | Ports) -> list[str]:
    return [channel.values.name for channel in side._channels[1:]] if isinstance(side, Ports) else []


@given(layouts())
def test_the_main_channels_are_a_chain(case: tuple[int, SkipLayout]) -> None:
    channels, _ = connected(*case)
    arrivals, departures = (list(map(main, each.values())) for each in (channels.arrivals, channels.departures))
    assert arrivals == [channels.entrance, *departures[:-1]]
    assert departures[-1] is channels.exit


@given(layouts())
def test_each_skip_leaves_its_source_and_comes_to_its_target(case: tuple[int, SkipLayout]) -> None:
    stages, layout = case
    channels, _ = connected(*case)
    for j in range(stages):
        for side, routes in (
            (channels.arrivals[j], [route for route in layout.routes if route.target == j]),
            (channels.departures[j], [route for route in layout.routes if route.source == j]),
        ):
            assert len(skips(side)) == len(routes)
            for name, route in zip(skips(side), routes, strict=True):
                assert repr(route.key[1]) in name
                assert f"between partitions {route.source} and {route.target}" in name
            assert isinstance(side, Ports) == bool(routes)  # where there are no skips nothing is in the way


@given(layouts(), st.data())
def test_whoever_waits_is_cancelled(case: tuple[int, SkipLayout], data: st.DataObject) -> None:
    channels, made = connected(*case)
    channels.cancel()
    link = data.draw(st.sampled_from([link for channel in made for link in (channel.values, channel.gradients)]))
    for _ in range(2):
        with pytest.raises(Cancelled):
            link.get(0)
