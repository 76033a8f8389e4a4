"""Virtual devices, which try the order of several devices on one, are themselves in order, and show what is not."""

from __future__ import annotations

import pytest
from packages.gpipe.tests.virtual import virtual_devices

from .accelerator import found, library
from .faults import Fault, planted
from .models import HOWS, MODES, assert_trains_like, model, piped
from .test_faults import FAULTS

LINKS = ("a copy does not wait", "the event of a copy", "the target does not wait")
"""How the names of faults begin that need a link which copies; others show where memory is freed."""


def races() -> list[str]:
    """Those of reading and writing. Memory that is freed may go back to a stream that waits before it is used again."""
    return [race.text for race in found() if not race.text.startswith("FREE")]


def train(how: str = "call", mode: str = "never", streams: str = "own", inline: bool = False) -> list[str]:
    """Train a pipe with all stages on one device; the races."""
    found()
    with virtual_devices():
        assert_trains_like(model(), piped(model(), "all on one device", mode), how, streams, inline=inline)
    return races()


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
def test_one_device_works_as_three(how: str, mode: str, inline: bool):
    assert train(how, mode, "foreign" if how == "call" else "own", inline) == []


def test_links_wait_and_copy():
    library().take_counters()
    assert train() == []
    with_links = library().take_counters()
    assert_trains_like(model(), piped(model(), "all on one device", "never"), "call", "own")
    without = library().take_counters()
    assert with_links["waits"] > without["waits"]


@pytest.mark.parametrize("fault", [fault for fault, *_ in FAULTS if fault.name.startswith(LINKS)], ids=str)
def test_faults_of_links_are_found_on_one_device(fault: Fault):
    with planted(fault):
        assert train() != []
