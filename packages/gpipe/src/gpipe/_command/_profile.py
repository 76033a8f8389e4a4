"""``gpipe profile``."""

from __future__ import annotations

from ..module._sequential import as_sequential
from ._inputs import Json, Sample, Target, profiled
from ._output import finish
from ._target import model_of, sample_of


def profile(
    target: Target,
    *,
    sample: Sample,
    device: str = "cpu",
    chunks: int = 1,
    timeout: float = 1.0,
    json: Json = False,
) -> None:
    """Measure what each layer costs.

    Args:
        device: Where to measure.
        chunks: Micro-batches that the mini-batch is cut into; one is measured.
        timeout: Seconds to measure for.
    """
    mini_batch = sample_of(sample)
    layers = as_sequential(model_of(target), mini_batch)
    found = profiled(layers, mini_batch, device, chunks, timeout)
    finish(found, found.to_json if json else None)
