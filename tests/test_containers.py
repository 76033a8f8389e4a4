"""A pipe computes what a plain loop over the micro-batches computes, whatever travels between the layers.

Every case is equal, or refused with one of the errors that the documentation names.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, event, given, settings

from .containers.cases import Case, cases
from .containers.runs import UntrainableError, expect_equal, piped, plainly

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),  # so it does in the plain model
]

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

REFUSALS: list[tuple[type[Exception], str]] = [
    (RuntimeError, "shares its memory with another one"),
    (RuntimeError, "in place on this micro-batch but not on the first"),
]
"""What a pipe may say instead of computing."""

UNTRAINABLE = (ValueError, "does not require grad")
"""What it must say of a step with nothing to train."""


def verdict(case: Case, steps: bool) -> str:
    """``equal``, or what was refused; AssertionError if there is a difference, and other errors as they come."""
    try:
        expected = plainly(case, steps)
    except UntrainableError:
        expected = None
    except RuntimeError as error:
        return f"plain: {str(error)[:60]}"
    try:
        found = piped(case, steps)
    except Exception as error:
        allowed = [*REFUSALS, *([] if expected else [UNTRAINABLE])]
        refusal = next((text for kind, text in allowed if isinstance(error, kind) and text in str(error)), None)
        if refusal is None:
            raise
        return f"refused: {refusal}"
    assert expected is not None
    for each, other in zip(found, expected, strict=True):
        expect_equal(each, other, tolerance=1e-4 if "single" in str(case) else 1e-9, zeros_for_none=case.stops)
    return "equal"


@pytest.mark.parametrize("steps", [False, True], ids=["backward", "step"])
def test_parity_with_the_plain_loop(steps: bool) -> None:
    """And few cases are refused: else the property would say little."""
    verdicts: Counter[str] = Counter()

    @settings(suppress_health_check=SLOW)
    @given(case=cases())
    def look(case: Case) -> None:
        found = verdict(case, steps)
        event(found)
        verdicts[found] += 1

    look()
    refused = sum(count for found, count in verdicts.items() if found.startswith("refused"))
    assert verdicts["equal"] > 10 * refused, verdicts
    assert verdicts["equal"] >= 0.6 * verdicts.total(), verdicts  # the plain model refuses some itself
