"""The cost of planning a model that is too large for this machine."""

import pytest
from benchmarks.large_model import CASES, measured


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_planning_large_model_is_cheap(case: tuple[str, str]):
    found = measured(*case)
    assert float(found["seconds"]) < 60  # CPU time, independent of other processes
    assert float(found["bytes"]) < 2e9
