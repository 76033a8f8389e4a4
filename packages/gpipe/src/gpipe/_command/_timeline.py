"""``gpipe timeline``."""

from __future__ import annotations

from contextlib import closing

from .._check._loss import mean_square
from .._gpipe import GPipe
from ..balance import balance_by_parameters
from ..module._sequential import as_sequential
from ..timeline import record
from ..timeline._chrome import trace
from ._inputs import Devices, Json, Numbers, Sample, Target
from ._output import expect_writable, finish
from ._target import model_of, sample_of


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
    pipe = GPipe(layers, sizes, devices=devices, chunks=chunks, checkpoint=checkpoint)
    with closing(pipe):
        for _ in range(2):
            with record() as recorded:
                pipe.step(mini_batch, loss_fn=mean_square, schedule=schedule)
    finish(recorded, (lambda: trace(recorded)) if json else None, html, recorded.save)
