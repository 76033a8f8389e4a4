"""``gpipe profile``."""

from __future__ import annotations

from profiler.target import model_of, sample_of

from ..module._sequential import as_sequential
from ._inputs import Json, Sample, Target, profiled
from ._output import expect_writable, finish


def profile(
    target: Target,
    *,
    sample: Sample,
    device: str = "cpu",
    chunks: int = 1,
    timeout: float = 1.0,
    json: Json = False,
    svg: str | None = None,
) -> None:
    """Measure what each layer costs.

    Args:
        device: Where to measure.
        chunks: Micro-batches that the mini-batch is cut into; one is measured.
        timeout: Seconds to measure for.
        svg: Save a picture there.
    """
    expect_writable(svg, ".svg")
    mini_batch = sample_of(sample)
    layers = as_sequential(model_of(target), mini_batch)
    found = profiled(layers, mini_batch, device, chunks, timeout)
    finish(found, found.to_json if json else None, svg, lambda path: path.write_text(found.picture(), encoding="utf-8"))
