"""The host goes on while devices work: it waits for them only where a stage is on the CPU."""

from __future__ import annotations

import pytest

from .accelerator import library
from .models import HOWS, MODES, ROWS, counted_squares, model, piped, rows, running
from .placements import PLACEMENTS, forward_streams


def counted(placement: str, mode: str, how: str, inline: bool) -> dict[str, int]:
    """What a training step asks of the devices, once a pipe has measured what it wants to know."""
    pipe = piped(model(), placement, mode)
    x = rows().to(pipe.devices[0])
    with running(inline), forward_streams("own"):
        for _ in range(8 if how == "zero_bubble" else 2):
            library().take_counters()
            if how == "call":
                pipe(x).square().sum().backward()
            else:
                pipe.step(x, loss_fn=counted_squares, reduction="sum", schedule=how)
        counters: dict[str, int] = library().take_counters()
    pipe.close()
    return counters


@pytest.mark.parametrize("placement", ["one device", "all on one device", "three devices"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("inline", [False, True], ids=["threads", "inline"])
def test_it_never_waits_for_devices_alone(placement: str, mode: str, how: str, inline: bool):
    counters = counted(placement, mode, how, inline)
    assert counters["kernels"] > ROWS
    assert counters["synchronisations"] == 0


@pytest.mark.parametrize("placement", [name for name, places in PLACEMENTS.items() if None in places])
@pytest.mark.parametrize("how", ["call", "1f1b"])
def test_copies_from_and_to_the_cpu_are_pinned(placement: str, how: str):
    assert counted(placement, "always", how, inline=False)["pageable"] == 0
