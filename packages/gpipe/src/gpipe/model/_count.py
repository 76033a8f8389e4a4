"""Pass the number of items of the full mini-batch to each micro-batch, so that models scale their loss by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from microbatch import Arguments, Replicate, unwrap

from ..module._inputs import Inputs

COUNT = "num_items_in_batch"
"""The argument that Hugging Face's ``Trainer`` passes to models, so that they scale their loss by it."""


class Counting(Protocol):
    """Counts labels."""

    def count(self, labels: Tensor) -> Tensor: ...


def with_whole_count(inputs: Any, convention: Counting | None = None) -> Any:
    """Return ``inputs`` with the number of items of the mini-batch, which every micro-batch receives unsplit.

    If it is not given, it is counted by the ``convention``, if any.
    """
    count, others = _split(inputs)
    labels = Inputs.of(unwrap(others)[0]).kwargs.get("labels") if count is None and convention is not None else None
    if convention is not None and isinstance(labels, Tensor):
        count = convention.count(labels)
    if count is None:
        return others
    count = count.value if isinstance(count, Replicate) else count
    # A tensor, because each new value of a constant would count as a new kind of inputs.
    whole = {COUNT: Replicate(torch.as_tensor(count))}
    if isinstance(others, Arguments):
        return Arguments(others.args, {**others.kwargs, **whole})
    return {**others, **whole}


def _split(inputs: Any) -> tuple[Any, Any]:
    """Return the number of items, or None, and the remaining arguments."""
    if isinstance(inputs, Arguments):
        count, kwargs = _split(inputs.kwargs)
        return count, inputs if kwargs is inputs.kwargs else Arguments(inputs.args, kwargs)
    if not isinstance(inputs, Mapping) or COUNT not in inputs:
        return None, inputs
    return inputs[COUNT], {name: value for name, value in inputs.items() if name != COUNT}
