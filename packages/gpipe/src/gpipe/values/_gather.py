"""The output of a pipe: its micro-batches put together."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from microbatch import Batch, gather, map_tensors

from ._leaves import Activation
from ._sharing import SEEN, guarded, ties_of, unchangeable


def gathered(outputs: Sequence[Activation], batches: Sequence[Batch], spec: Any = None) -> Any:
    """The output, of the outputs of the last stage for each micro-batch.

    Tensors that share memory in a micro-batch have memory of their own where there are several. The plain model would
    change all of them with one; so torch refuses to change those that require grad.

    Args:
        outputs: one for each micro-batch.
        batches: the micro-batches that went in, of which only the rows count.
        spec: how leaves are put together, as :func:`microbatch.gather` takes it.
    """
    if len(outputs) == 1:
        outputs = [guarded(outputs[0])]
    whole = gather(map(Batch, map(_value, outputs), map(_rows, batches)), spec)
    if len(outputs) == 1 or not any(SEEN in output.ties for output in outputs):
        return whole
    shared = iter([SEEN in ties for ties in zip(*map(ties_of, outputs), strict=True)])
    return map_tensors(lambda tensor: unchangeable(tensor) if next(shared) else tensor, whole)


_value, _rows = attrgetter("value"), attrgetter("rows")
