"""Between which stages tensors go from device to device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from gpipe.distributed._places import Place, channels_between, checked_transport, direct, place_of, places_of
from gpipe.skip import SkipLayout
from gpipe.skip._layout import Route

NOWHERE = Place(None, None)
PLACES = st.sampled_from(
    [NOWHERE, *[Place(backend, card) for backend in ("nccl", "xccl") for card in (None, "a", "b")]]
)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[list[int], SkipLayout, list[Place]]:
    """The ranks of stages, skips between them, and where they are."""
    ranks = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    pairs = [(a, b) for a in range(len(ranks)) for b in range(a + 1, len(ranks))]
    routes = draw(st.lists(st.sampled_from(pairs), max_size=3)) if pairs else []
    layout = SkipLayout([Route((None, str(k)), a, b) for k, (a, b) in enumerate(routes)])
    return ranks, layout, draw(st.lists(PLACES, min_size=len(ranks), max_size=len(ranks)))


@given(laid_out(), st.data())
def test_both_directions_of_what_is_between_devices_that_reach_each_other(
    problem: tuple[list[int], SkipLayout, list[Place]], data: st.DataObject
):
    ranks, layout, places = problem
    apart = [(a, b) for a in range(len(ranks)) for b in range(len(ranks)) if ranks[a] != ranks[b]]
    ties = data.draw(st.lists(st.sampled_from(apart), max_size=3)) if apart else []
    found = direct(ranks, layout, ties, places)
    assert len({each.tag for each in found}) == len(found)
    assert {(source, target) for _, source, target in found} == {
        each
        for a, b in [*(each[1:] for each in channels_between(ranks, layout)), *ties]
        if places[a].backend == places[b].backend is not None
        and (places[a].card is None or places[a].card != places[b].card)
        for each in ((a, b), (b, a))
    }
    assert all(ranks[source] != ranks[target] for _, source, target in found)


@given(laid_out())
def test_each_rank_tells_of_its_own_stages(problem: tuple[list[int], SkipLayout, list[Place]]):
    ranks, _, places = problem
    told = [[list(place) for place, rank in zip(places, ranks, strict=True) if rank == k] for k in range(4)]
    assert places_of(ranks, told) == places


def test_the_cpu_has_no_direct_way():
    assert place_of(torch.device("cpu"), "auto") == NOWHERE


@pytest.mark.parametrize("wrong", ["nccl", "", None, 1])
def test_ways_that_are_not_there(wrong: object):
    with pytest.raises(ValueError, match=r"transport must be one of 'auto', 'host'; got"):
        checked_transport(wrong)  # type: ignore[arg-type]
