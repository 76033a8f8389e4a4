"""The bytes of an optimizer's state, from its name, class or instance."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer

STATES = {
    "sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1, "lars": 1, "muon": 1, "adadelta": 2, "adam": 2,
    "adamw": 2, "adamax": 2, "nadam": 2, "radam": 2, "lamb": 2, "amsgrad": 3, "ademamix": 3,
}  # fmt: skip
"""The number of values in an optimizer's state per trained value."""

ADAFACTOR = "adafactor"
"""The optimizer with a value per row and per column of each matrix."""

_NAME = re.compile(r"(?:paged)?([a-z]+?)(8bit|32bit)?")
_DECORATION = re.compile(r"[^a-z0-9]|torch|fused|bnb")

_SMALL, _BLOCK = 4096, 256
"""8-bit optimizers keep 32 bits for smaller tensors, and a scale of 32 bits per block. Source: bitsandbytes."""


class State(NamedTuple):
    """The state of an optimizer.

    Attributes:
        name: its key in :data:`STATES`, or :data:`ADAFACTOR`.
        bits: the bits per value; 0 for the dtype of the parameter.
        values: the number of values per trained value.
    """

    name: str
    bits: int = 0
    values: int = 0

    def count_bytes(self, parameter: nn.Parameter) -> float:
        count, size = parameter.numel(), self.bits // 8 or parameter.itemsize
        if self.name == ADAFACTOR and parameter.dim() > 1:
            *batch, rows, columns = parameter.shape
            return math.prod(batch) * (rows + columns) * size
        if self.bits != 8:
            return self.values * count * size
        return self.values * (4 * count if count < _SMALL else count + 4 * -(-count // _BLOCK))


def optimizer_bytes(optimizer: Any, layers: Iterable[nn.Module]) -> list[int]:
    """Return the bytes of the optimizer's state per layer. A shared parameter counts for its first layer.

    >>> layers = [nn.Linear(100, 100, bias=False)]
    >>> optimizer_bytes("adamw", layers), optimizer_bytes("adamw_8bit", layers)
    ([80000], [20320])
    """
    state = _get_byte_counter(optimizer)
    seen, found = set[nn.Parameter](), list[int]()
    for layer in layers:
        own = {p for p in layer.parameters() if p.requires_grad} - seen
        seen |= own
        found.append(round(sum(map(state, own))))
    return found


def _get_byte_counter(optimizer: Any) -> Callable[[nn.Parameter], float]:
    """Return a function from a trained parameter to the bytes of its state."""
    if isinstance(optimizer, str):
        return _parse_name(optimizer, optimizer).count_bytes
    if isinstance(optimizer, Optimizer):
        return _of_instance(optimizer).count_bytes
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        return _of_class(optimizer).count_bytes
    if isinstance(optimizer, bool) or not isinstance(optimizer, (int, float)):
        raise TypeError(
            "optimizer: expected a name such as 'adamw' or 'adamw_8bit', an optimizer or its class, or the bytes of "
            f"its state per parameter, such as 8; got {optimizer!r}"
        )
    if not 0 <= optimizer < float("inf"):
        raise ValueError(f"optimizer: expected a finite, non-negative number of bytes per parameter, got {optimizer!r}")
    return lambda parameter: optimizer * parameter.numel()


def _of_instance(optimizer: Optimizer) -> State:
    found, given = _of_class(type(optimizer)), optimizer.defaults
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", found.bits)
    more = bool(given.get("amsgrad")) + (found.name == "sgd" and bool(given.get("momentum")))
    return found._replace(bits=bits, values=found.values + more)


def _of_class(kind: type[Optimizer]) -> State:
    found = _parse_name(kind.__name__, kind)
    # The states of bitsandbytes have 32 bits, whatever the dtype of the parameter.
    return found if found.bits or kind.__module__.split(".")[0] != "bitsandbytes" else found._replace(bits=32)


def _parse_name(name: str, given: object) -> State:
    match = _NAME.fullmatch(_DECORATION.sub("", name.lower()))
    if match is None or match[1] not in (*STATES, ADAFACTOR):
        known = ", ".join(map(repr, [*STATES, ADAFACTOR]))
        raise ValueError(
            f"optimizer: expected one of {known}, perhaps with '8bit' as in 'adamw_8bit', or the bytes of its state "
            f"per parameter; got {given!r}"
        )
    return State(match[1], int((match[2] or "0").removesuffix("bit")), STATES.get(match[1], 1))
