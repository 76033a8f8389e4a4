"""``gpipe simulate``."""

from __future__ import annotations

from ..balance import balance_cost
from ..engine._workers import placement
from ..module._arguments import checked_devices
from ..module._sequential import as_sequential
from ..simulate import simulate as simulate_schedule
from ..simulate import stage_costs
from ..timeline._chrome import trace
from ._inputs import Devices, Json, Numbers, Sample, Target, profiled
from ._output import expect_writable, finish
from ._target import model_of, sample_of


def simulate(
    target: Target,
    *,
    sample: Sample,
    devices: Devices = ("cpu", "cpu"),
    balance: Numbers = None,
    chunks: int = 8,
    schedule: str = "1f1b",
    checkpoint: str = "never",
    timeout: float = 1.0,
    json: Json = False,
    html: str | None = None,
) -> None:
    """Measure the layers, and predict a step of a pipeline of them.

    Args:
        devices: One for each stage; layers are measured on the first. Stages on one device take turns; a plain cpu is
            one for each stage.
        balance: Layers of each stage; by default the best for the measured times.
        chunks: Micro-batches.
        schedule: 1f1b, fill_drain, interleaved, looped_bfs, zero_bubble, interleaved_zero_bubble, zbv or dualpipev.
        checkpoint: never, except_last or always.
        timeout: Seconds to measure for.
        html: Save the timeline there, as a page.
    """
    expect_writable(html, ".html", ".json", ".svg")
    mini_batch = sample_of(sample)
    layers = as_sequential(model_of(target), mini_batch)
    places = checked_devices(devices, len(devices))
    measured = profiled(layers, mini_batch, str(places[0]), chunks, timeout)
    sizes = balance_cost(measured.seconds, len(places)) if balance is None else balance
    costs = stage_costs(measured, sizes)
    placed = placement(places)
    found = simulate_schedule(schedule, costs, microbatches=chunks, checkpoint=checkpoint, placement=placed)
    finish(found, (lambda: trace(found)) if json else None, html, found.save)
