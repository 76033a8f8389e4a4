"""Refuse early, and by name, what cannot be cut into micro-batches."""

from typing import Any

from torch import Tensor

from ._spec import cut_rules


def check(value: Any, spec: Any = None) -> None:
    """Do nothing if `value` can be a mini-batch: tensors, None, and trees of them.

    Numbers, strings and other objects pass only inside `Replicate(...)`, or where `spec` says so. Reads no data.

    Raises:
        TypeError: names the path of the first leaf that is neither, as in `input['mask'][1]`.
        ValueError: `spec` has another shape than `value`.

    >>> import torch
    >>> check((torch.ones(2), None))
    >>> check((torch.ones(2), 42))
    Traceback (most recent call last):
    TypeError: input[1] is of type int, which cannot be split; expected a tensor, None or a tree of them; \
Replicate() around it, or in the spec, hands it whole to every micro-batch
    """
    if spec is None and is_flat(value):
        return
    cut_rules(value, spec)


def is_flat(value: Any) -> bool:
    """Whether `value` is what most models take: one tensor, or a plain tuple of tensors. They need no pytree."""
    return isinstance(value, Tensor) or is_tensors(value)


def is_tensors(value: Any) -> bool:
    if type(value) is not tuple:
        return False
    for each in value:  # noqa: SIM110 — a loop costs half of all(...)
        if not isinstance(each, Tensor):
            return False
    return True
