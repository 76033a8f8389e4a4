"""What it takes to plan a model that is too large for this machine."""

import pytest
from benchmarks.large_model import CASES, measured


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_large_model_is_planned_in_a_minute_and_little_memory(case: tuple[str, str]):
    found = measured(*case)
    assert float(found["seconds"]) < 60  # of a processor: what else runs here does not count
    assert float(found["bytes"]) < 2e9
