"""The loss that a model computes itself, and the convention by which those of micro-batches add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from microbatch import Arguments, Replicate, unwrap

from ._inputs import Inputs

if TYPE_CHECKING:
    from ._ending import Ending

LOSS_ONLY = frozenset({"num_items_in_batch"})
"""Arguments by which Hugging Face's ``Trainer`` tells models how to scale their loss."""

IGNORED = -100


@dataclass(frozen=True)
class Convention:
    """The loss is a sum over ``labels``, divided by ``num_items_in_batch``; without that, by the labels that count.

    All labels but those of -100 count. If all micro-batches get the number of the whole mini-batch, their losses add
    up.

    Attributes:
        skipped: how many labels at the start of each row do not count; 1 where a token predicts the next one.
    """

    skipped: int

    def count(self, labels: Tensor) -> Tensor:
        """How many ``labels`` count. The host does not wait for it."""
        counted = labels if labels.dim() < 2 else labels[..., self.skipped :]
        return (counted != IGNORED).sum()


class OwnLoss(NamedTuple):
    """How the loss of a mini-batch is computed.

    Attributes:
        model: the name of the model's class, for errors.
        convention: how the losses of micro-batches add up; None if that is not known.
        ending: what computes the loss of all rows, from what the modules next to it returned; None if that cannot be.
    """

    model: str
    convention: Convention | None
    ending: Ending | None

    def __deepcopy__(self, memo: object) -> OwnLoss:
        return self

    def refused(self) -> ValueError:
        """The error for a loss of all rows that cannot be computed."""
        return ValueError(
            f"{self.model} computes a loss that cannot be computed for all rows from what the last block and the "
            "modules after it return for each micro-batch, such as where rows are not dimension 0, a block returns a "
            "loss of its own, or the loss is not a number for the sample; give another sample, or give step() and "
            'evaluate() a loss_fn of what the loss is computed from: GPipe(model, sample=sample, pick="logits"), or '
            "another part of the output"
        )

    def adds_up(self, inputs: Any) -> bool:
        """Whether the losses of micro-batches add up for these ``inputs``."""
        found, others = split_loss_only(inputs)
        return self.convention is not None and (bool(found) or _labels(others) is not None)


class Counting(Protocol):
    """Counts labels."""

    def count(self, labels: Tensor) -> Tensor: ...


def with_whole_count(inputs: Any, convention: Counting | None = None) -> Any:
    """``inputs`` with the number of items of the mini-batch, which every micro-batch gets as a whole.

    By the ``convention``, it is counted where it is not given.
    """
    found, others = split_loss_only(inputs)
    labels = None if found else _labels(others)
    if labels is not None and convention is not None:
        found = {"num_items_in_batch": convention.count(labels)}
    if not found:
        return others
    # Not a constant: every new one would be kept with the layers.
    whole = {name: Replicate(torch.as_tensor(value)) for name, value in found.items()}
    if isinstance(others, Arguments):
        return Arguments(others.args, {**others.kwargs, **whole})
    return {**others, **whole}


def _labels(inputs: Any) -> Tensor | None:
    found = Inputs.of(unwrap(inputs)[0]).kwargs.get("labels")
    return found if isinstance(found, Tensor) else None


def split_loss_only(inputs: Any) -> tuple[dict[str, Any], Any]:
    """The arguments that only the loss needs, without those that are None, and the others."""
    if isinstance(inputs, Arguments):
        found, kwargs = split_loss_only(inputs.kwargs)
        return found, inputs if kwargs is inputs.kwargs else Arguments(inputs.args, kwargs)
    if not isinstance(inputs, Mapping) or LOSS_ONLY.isdisjoint(inputs):
        return {}, inputs
    found = {name: value for name, value in inputs.items() if name in LOSS_ONLY and value is not None}
    return found, {name: value for name, value in inputs.items() if name not in LOSS_ONLY}


def without_loss_only(inputs: Any) -> Any:
    return split_loss_only(inputs)[1]
