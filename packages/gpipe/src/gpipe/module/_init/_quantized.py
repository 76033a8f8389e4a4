"""Packed weights in a checkpoint: which entries are their parts, and how a parameter takes them.

bitsandbytes saves the parts of a 4-bit weight below its name (``weight.absmax``), and those of an 8-bit weight beside
it: ``SCB``, the scales of its rows, and ``weight_format``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

_SCALES = "SCB"
_BESIDE = {_SCALES, "weight_format"}


def find_packed(expected: Mapping[str, Any], saved: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the packed weights in a checkpoint, each with its parts.

    Args:
        expected: the parameters and buffers of the model, by name.
        saved: the names in the checkpoint.

    Returns:
        For the name of each weight, a dict from the names of its parts to their names in the checkpoint.
    """
    found: dict[str, dict[str, str]] = {}
    for key in saved:
        if key in expected:
            continue
        owner = _owner(expected, key)
        if owner is not None:
            found.setdefault(owner, {})[_part(owner, key)] = key
    return {owner: parts for owner, parts in found.items() if _SCALES in parts or not is_in_rows(expected[owner])}


def unpack(parameter: Any, data: Tensor, parts: Mapping[str, Tensor]) -> None:
    """Let ``parameter`` hold packed ``data`` and its parts, on its device."""
    if is_in_rows(parameter):
        parameter.data = data.to(parameter.device)
        parameter.CB, parameter.SCB = parameter.data, parts[_SCALES].to(parameter.device)
        return
    module = getattr(parameter, "module", None)
    made = type(parameter).from_prequantized(
        data=data, quantized_stats=dict(parts), requires_grad=False, device=parameter.device, module=module
    )
    parameter.data = made.data
    vars(parameter).update(vars(made))


def is_part(expected: Mapping[str, Any], key: str) -> bool:
    """Return whether an entry looks like a part of a packed weight, although the model's weight may not be packed."""
    above, _, last = key.rpartition(".")
    return above in expected or last in _BESIDE


def _owner(expected: Mapping[str, Any], key: str) -> str | None:
    """Return the name of the weight that an entry is a part of."""
    above, _, last = key.rpartition(".")
    beside = f"{above}.weight".lstrip(".")
    if last in _BESIDE and is_in_rows(expected.get(beside)):
        return beside
    while above and above not in expected:
        above = above.rpartition(".")[0]
    return above if hasattr(type(expected.get(above)), "from_prequantized") else None


def _part(owner: str, key: str) -> str:
    return key.removeprefix(f"{owner}.") if key.startswith(f"{owner}.") else key.rpartition(".")[2]


def is_in_rows(parameter: object) -> bool:
    """Return whether a parameter is a ``bitsandbytes.nn.Int8Params``, or like one."""
    return isinstance(parameter, torch.nn.Parameter) and hasattr(parameter, "CB") and hasattr(parameter, "SCB")
