"""A model with a skip, placed, checkpointed, scheduled and streamed in every way: no races, and as the plain model."""

from itertools import product

import pytest

from . import test_tied
from .models import HOWS, MODES, OF_ALL, assert_trains_like, model, piped, some_of, whole_squares
from .placements import PLACEMENTS, STREAMS, UNEVEN

CASES = [
    (placement, how, streams)
    for placement, how, streams in product(PLACEMENTS, HOWS, STREAMS)
    if how == "call" or streams != "foreign"  # in a step the caller has no backward
    if not (how == "interleaved" and placement in UNEVEN)
]


@pytest.mark.parametrize(
    ("case", "mode", "inline", "shares"),
    some_of(CASES, MODES, [False, True], [False, True], every=23),
    ids=lambda value: str(value).replace("'", ""),
)
def test_in_order_and_equal(case: tuple[str, str, str], mode: str, inline: bool, shares: bool):
    """Stages on several devices may share parameters."""
    placement, how, streams = case
    plain = test_tied.model() if shares else model()
    assert_trains_like(plain, piped(plain, placement, mode), how, streams, inline=inline)


@pytest.mark.parametrize(
    ("placement", "how", "streams", "mode", "inline", "shares"),
    some_of(PLACEMENTS, OF_ALL, ["default", "own"], MODES, [False, True], [False, True], every=29),
)
def test_a_loss_of_all_rows(placement: str, how: str | None, streams: str, mode: str, inline: bool, shares: bool):
    plain = test_tied.model() if shares else model()
    pipe = piped(plain, placement, mode)
    assert_trains_like(plain, pipe, how, streams, inline=inline, loss_fn=whole_squares)
