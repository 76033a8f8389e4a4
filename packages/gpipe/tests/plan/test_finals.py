"""Which ways to train are tried, and that the one is taken which was fastest then."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import gpipe
from gpipe import inline, plan
from gpipe._plan import _calibrate
from gpipe._plan._calibrate import calibrated
from gpipe._plan._candidate import Candidate, key, simplicity
from gpipe._plan._costs import Measured
from gpipe._plan._finals import CLOSE, STEPS, finalists
from gpipe._plan._rehearse import total
from gpipe._plan._search import search
from gpipe.schedule import Kind

from ..layers import linears, rows
from ..plans import fits, measurements, space_of

pytestmark = pytest.mark.usefixtures("one_thread")
few = settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

Try = Callable[..., list[float]]


def steps_off_by(seed: int, share: float, log: dict[object, Candidate]) -> Try:
    """Every way takes what its costs say, more or less a share that it alone has."""

    def tried(layers, devices, x, y, loss_fn, way: Candidate) -> list[float]:
        log[key(way)] = way
        factor = 1 + share * Random(f"{seed}{key(way)}").uniform(-1, 1)
        return [factor * way.seconds] * STEPS

    return tried


@few
@given(measurements(), st.integers(0, 99), st.sampled_from([0.0, 0.05, 0.15]))
def test_of_those_that_were_tried_the_fastest_is_taken_and_its_seconds_are_those_of_its_steps(
    measured: Measured, seed: int, share: float
):
    space, log = space_of(measured), dict[object, Candidate]()
    tried = steps_off_by(seed, share, log)
    with patch.object(_calibrate, "_tried", tried):
        found, spread, note = calibrated(space, search(space), nn.Sequential(), [], None, None, None)
    took = {name: median(tried(None, None, None, None, None, way)) for name, way in log.items()}
    assert took[key(found[0])] == pytest.approx(found[0].seconds)
    assert took[key(found[0])] <= min(took.values()) * (1 + CLOSE) * (1 + 1e-6)
    assert (spread.low, spread.mid, spread.high) == pytest.approx((0.95, 1, 1.05))
    assert [each.seconds for each in found[1:]] == sorted(each.seconds for each in found[1:])
    assert len({key(each) for each in found}) == len(found)
    assert "trained in turns" in note


@few
@given(measurements(), st.floats(0.3, 2), st.floats(1e-3, 10))
def test_ways_that_are_tried_fit_and_the_best_of_the_search_is_among_them(
    measured: Measured, share: float, step: float
):
    space = space_of(measured)
    space = space_of(measured, round(share * search(space)[0].fullest))
    found = search(space)
    if not found:
        return
    ways = finalists(space, found, step)
    fastest = min(each.seconds for each in found)
    assert 1 <= len(ways) <= 5
    assert len({key(way) for way in ways}) == len(ways)
    assert ways[0].seconds <= fastest * (1 + CLOSE)
    for way in ways:
        assert fits(space, way)
        assert sum(way.sizes) == measured.layers
        assert min(way.sizes) > 0
        for other in ways:  # no two differ in schedule alone, where that makes no difference
            same = (way.chunks, way.sizes, way.modes) == (other.chunks, other.sizes, other.modes)
            if way is not other and same and simplicity(way) < simplicity(other):
                assert other.seconds < way.seconds


@pytest.mark.parametrize(("count", "chunks", "made"), [(8, 2, 2), (9, 4, 3)])
def test_a_trial_does_what_the_candidate_says(count: int, chunks: int, made: int):
    """Of 9 rows in 4 chunks `torch.chunk` makes 3."""
    layers, x = linears(4), rows(count)
    known = plan(layers, x, ["cpu"] * 2, chunks=chunks, schedule="zero_bubble", checkpoint="never", calibrate=False)
    way: Any = SimpleNamespace(sizes=known.sizes, chunks=chunks, modes=known.modes, schedule="zero_bubble", split=(1,))
    with inline(), gpipe.record() as timeline:
        trial = _calibrate._tried(layers, [torch.device("cpu")] * 2, x, None, total, way)
    events = [event for event in timeline.events if event.stage == 1]
    assert {event.kind for event in events} == {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    assert {event.microbatch for event in events} == set(range(made))
    assert len(trial) == STEPS
