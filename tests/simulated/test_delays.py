"""The matrix with workers that are held up at random: nothing depends on when the host does what."""

from __future__ import annotations

import pytest

from .delays import delayed
from .models import MODES, assert_trains_like, model, piped
from .test_matrix import CASES


@pytest.mark.parametrize(("placement", "how", "streams"), CASES[::3])
def test_a_step_with_delays(placement: str, how: str, streams: str):
    seed = CASES.index((placement, how, streams))
    with delayed(seed):
        assert_trains_like(model(), piped(model(), placement, MODES[seed % len(MODES)]), how, streams)
