"""Calibration: which candidates are tried, and which of them is chosen."""

from collections.abc import Callable
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe._plan._calibrate import CLOSE, try_candidates
from gpipe._plan._candidate import Candidate
from gpipe._plan._costs import Measured
from gpipe._plan._search import search
from gpipe._plan._verify import STEPS

from ..plans import few, measurements, space_of


def steps_off_by(seed: int, share: float, log: dict[object, Candidate]) -> Callable[[Candidate], list[float]]:
    """Return trials whose steps deviate from their predicted time by up to ``share``, at random per candidate."""

    def tried(candidate: Candidate) -> list[float]:
        log[candidate.key] = candidate
        return [(1 + share * Random(f"{seed}{candidate.key}").uniform(-1, 1)) * candidate.seconds] * STEPS

    return tried


@settings(few, max_examples=15)
@given(measurements(), st.integers(0, 99), st.sampled_from([0.0, 0.05, 0.15]), st.floats(0.3, 2))
def test_fastest_of_the_tried_candidates_is_chosen(measured: Measured, seed: int, share: float, room: float):
    """Only candidates that fit are tried. The chosen one is the fastest up to ``CLOSE``, and gets its measured time."""
    space, log = space_of(measured), dict[object, Candidate]()
    best = search([space])[0]
    space = space_of(measured, round(room * best.fullest))
    ways = search([space])
    if not ways[0].fits(space.memory):
        return
    tried = steps_off_by(seed, share, log)
    found, spread, note = try_candidates(
        lambda candidate: candidate.fits(space.memory), ways, tried, lambda candidate: candidate
    )
    took = {name: median(tried(candidate)) for name, candidate in log.items()}
    assert took[found[0].key] == pytest.approx(found[0].seconds)
    assert took[found[0].key] <= min(took.values()) * (1 + CLOSE) * (1 + 1e-6)
    assert all(candidate.fits(space.memory) for candidate in log.values())
    assert 1 <= len(log) <= 4
    assert (spread.low, spread.mid, spread.high) == pytest.approx((0.95, 1, 1.05))
    assert [each.seconds for each in found[1:]] == sorted(each.seconds for each in found[1:])
    assert len({each.key for each in found}) == len(found)
    assert "trained in interleaved steps" in note
