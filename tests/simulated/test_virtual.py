"""Virtual devices, which try the order of several devices on one, are themselves in order, and show what is not."""

import pytest
from packages.gpipe.tests.virtual import virtual_devices

from .accelerator import found
from .faults import planted
from .models import assert_trains_like, model, piped
from .test_faults import FAULTS

ON_ONE_DEVICE = (
    "a copy does not wait for what computes its source",
    "the event of a copy is recorded where nothing is copied",
    "the target does not wait for a copy",
    "workers compute on the default streams",
    "an inline run stays on the streams of its caller",
)
"""Faults detectable on a single device, in more than frees of memory.

Faults in a backward on different streams are not: on a single device, autograd itself synchronizes the streams of the
forward and the backward.
"""


def races() -> list[str]:
    """Return races between reads and writes. Freed memory may return to a stream that waits before reusing it."""
    return [race.text for race in found() if not race.text.startswith("FREE")]


def train(how: str = "call", mode: str = "never", streams: str = "own", inline: bool = False) -> list[str]:
    """Train a pipe with all stages on one device; the races."""
    found()
    with virtual_devices():
        assert_trains_like(model(), piped(model(), "all on one device", mode), how, streams, inline=inline)
    return races()


@pytest.mark.parametrize("name", ON_ONE_DEVICE)
def test_faults_are_found_on_one_device(name: str):
    (fault,) = [fault for fault, _ in FAULTS if fault.name == name]
    with planted(fault):
        assert train(streams="foreign") + train(mode="always", streams="foreign", inline=True) != []
