"""``gpipe profile``, ``gpipe simulate`` and ``gpipe timeline``: what a step costs, layer by layer and as a pipeline."""

from __future__ import annotations

from contextlib import closing

import torch
from rich.console import Console

import profiler
from microbatch import scatter

from .._check._loss import mean_square
from .._gpipe import GPipe
from ..balance import balance_by_parameters, balance_cost
from ..engine._workers import placement
from ..module._arguments import checked_devices
from ..module._partition import as_sequential
from ..simulate import simulate as simulate_schedule
from ..simulate import stage_costs
from ..timeline import record
from ..timeline._chrome import trace
from ._inputs import Devices, Json, Numbers, Sample, Target
from ._output import expect_writable, finish
from ._target import model_of, sample_of


def profile(
    target: Target, *, sample: Sample, device: str = "cpu", chunks: int = 1, timeout: float = 1.0, json: Json = False
) -> None:
    """Measure what each layer costs.

    Args:
        device: Where to measure.
        chunks: Micro-batches that the mini-batch is cut into; one is measured.
        timeout: Seconds to measure for.
    """
    mini_batch = sample_of(sample)
    layers = as_sequential(model_of(target), mini_batch)
    bar, place = Console(stderr=True).is_terminal, torch.device(device)
    found = profiler.profile(layers, mini_batch, device=place, chunks=chunks, timeout=timeout, progress=bar)
    finish(found, found.to_json if json else None)


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
    measured = profiler.profile(layers, mini_batch, device=places[0], chunks=chunks, timeout=timeout)
    sizes = balance_cost(measured.seconds, len(places)) if balance is None else balance
    costs, placed = stage_costs(measured, sizes), placement(places)
    found = simulate_schedule(
        schedule, costs, microbatches=len(scatter(mini_batch, chunks)), checkpoint=checkpoint, placement=placed
    )
    finish(found, (lambda: trace(found)) if json else None, html, found.save)


def timeline(
    target: Target,
    *,
    sample: Sample,
    devices: Devices = ("cpu", "cpu"),
    balance: Numbers = None,
    chunks: int = 8,
    schedule: str = "1f1b",
    checkpoint: str = "never",
    json: Json = False,
    html: str | None = None,
) -> None:
    """Run a step of a pipeline twice, and show what each stage did in the second.

    The loss is the mean square of the output.

    Args:
        devices: One for each stage.
        balance: Layers of each stage; by default even by the bytes of their parameters.
        chunks: Micro-batches.
        schedule: 1f1b, fill_drain, interleaved, looped_bfs, zero_bubble, interleaved_zero_bubble, zbv, dualpipev, or
            auto.
        checkpoint: never, except_last or always.
        html: Save the timeline there, as a page.
    """
    expect_writable(html, ".html", ".json", ".svg")
    mini_batch = sample_of(sample)
    layers = as_sequential(model_of(target), mini_batch)
    sizes = balance_by_parameters(len(devices), layers) if balance is None else balance
    with closing(GPipe(layers, sizes, devices=devices, chunks=chunks, checkpoint=checkpoint)) as pipe:
        for _ in range(2):  # the first step opens threads and warms up kernels
            with record() as recorded:
                pipe.step(mini_batch, loss_fn=mean_square, schedule=schedule)
    finish(recorded, (lambda: trace(recorded)) if json else None, html, recorded.save)
