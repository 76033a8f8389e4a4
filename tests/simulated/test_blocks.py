"""Stages of which some layers are checkpointed, on accelerators: nothing is out of order in a recomputation."""

from __future__ import annotations

import pytest

from .models import SCHEDULED, assert_trains_like, model, piped, some_of
from .placements import PLACEMENTS


@pytest.mark.parametrize(("placement", "inline", "how"), some_of(list(PLACEMENTS), [False, True], SCHEDULED, every=2))
def test_they_train_like_the_model(placement: str, inline: bool, how: str):
    plain = model()
    pipe = piped(plain, placement)
    pipe.checkpoint = [[k % 2 == 0 for k in range(size)] for size in pipe.balance]
    assert_trains_like(plain, pipe, how, "own", inline=inline)
