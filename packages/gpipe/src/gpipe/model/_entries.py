"""Find lists with one entry per row among the arguments of a model, such as the labels of detectors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from microbatch import Arguments, Entries, flatten


def with_entries(inputs: Any, named: Collection[str] = ()) -> Any:
    """Return ``inputs`` with ``Entries()`` around each list that has one entry per row.

    Args:
        named: keywords that have a rule already.

    Raises:
        ValueError: a list may have one entry per row, or consist of tensors for the full mini-batch.
    """
    if not isinstance(inputs, Arguments):
        return inputs
    parts: dict[int | str, Any] = dict(enumerate(inputs.args))
    parts.update(inputs.kwargs)
    rows = next((part.shape[0] for part in parts.values() if isinstance(part, Tensor) and part.dim()), 0)
    found: dict[int | str, Any] = {
        name: Entries(part) if name not in named and _are_entries(part, rows, name) else part
        for name, part in parts.items()
    }
    if all(found[name] is parts[name] for name in parts):
        return inputs
    return Arguments(tuple([found[k] for k in range(len(inputs.args))]), {name: found[name] for name in inputs.kwargs})


def _are_entries(value: Any, rows: int, name: int | str) -> bool:
    if type(value) is not list or not rows or len(value) != rows:
        return False
    tensors = [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
    are_records = all(isinstance(each, Mapping) or is_dataclass(each) for each in value)
    if not tensors or not (are_records or _are_alike(value)):
        return False
    if rows > 1 and all(tensor.dim() and tensor.shape[0] % rows == 0 for tensor in tensors):
        place = f"the keyword {name!r}" if isinstance(name, str) else f"positional argument {name}"
        raise ValueError(
            f"{place} is a list of {rows}, as many as the mini-batch has rows, of tensors that may have all rows too; "
            "put microbatch.Entries(...) around it if it has an entry for each row, or microbatch.Split(..., dim=0) if "
            "its tensors have a row for each; for a keyword also by in_spec={name: Entries()}"
        )
    return True


def _are_alike(values: Sequence[Any]) -> bool:
    """Return whether ``values`` are tensors that differ in their first size only."""
    if not all(isinstance(each, Tensor) and each.dim() for each in values):
        return False
    return len({(each.shape[1:], each.dtype) for each in values}) == 1
