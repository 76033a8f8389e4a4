"""The table of docs/howto/many-devices.md is what plans say."""

import pytest
from benchmarks.many_devices import CASES, MADE_WITH, NODES, PAGE, measured, row, rows, version


def test_it_has_a_line_for_each_number_of_devices():
    assert list(rows(PAGE.read_text(encoding="utf-8"))) == list(NODES)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_large_model_is_planned_in_a_minute_and_little_memory(case: tuple[str, str]):
    found = measured(*case)
    assert float(found["seconds"]) < 60  # of a processor: what else runs here does not count
    assert float(found["bytes"]) < 2e9


@pytest.mark.long
@pytest.mark.parametrize("devices", NODES)
def test_a_line_is_as_planned(devices: int):
    page = PAGE.read_text(encoding="utf-8")
    if f"{MADE_WITH} {version()} " not in page:
        pytest.skip("other versions of torch keep other tensors for the backward")
    assert row(devices) == rows(page)[devices]
