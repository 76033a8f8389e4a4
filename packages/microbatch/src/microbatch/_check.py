"""Check that a value can be cut into micro-batches."""

from typing import Any

from ._spec import cut_rules
from ._tree import is_flat


def check(value: Any, spec: Any = None) -> None:
    """Raise unless `value` can be a mini-batch: tensors, None, and trees of them.

    Numbers, strings and other objects are allowed only inside `Replicate(...)`, or with this rule in `spec`. Reads no
    data.

    Args:
        value: the value that is to be cut.
        spec: rules, as for `scatter`.

    Raises:
        TypeError: a leaf cannot be cut; the message names the path of the first, as in `input['mask'][1]`.
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
