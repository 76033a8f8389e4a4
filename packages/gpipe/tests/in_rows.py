"""A layer with an 8-bit weight and per-row scales, as in bitsandbytes, whose attributes refer to the weight."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Rows(nn.Parameter):
    """A weight that a move from the CPU packs. After another move, its attributes are where they were."""

    CB: Tensor | None
    SCB: Tensor | None

    def __new__(cls, data: Tensor, codes: Tensor | None = None, scales: Tensor | None = None) -> Rows:
        made = Tensor._make_subclass(cls, data, False)
        made.CB, made.SCB = codes, scales
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        return Rows(*(copy.deepcopy(each, memo) for each in (self.data, self.CB, self.SCB)))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.dtype != torch.int8 and not self.is_meta:
            assert not self.isnan().any()  # no memory without values is packed
            self.SCB = self.detach().abs().amax(1) / 127
            self.data = self.CB = (self.detach() / self.SCB[:, None]).round().to(torch.int8)
            return self
        return super().to(*args, **kwargs)


class InRows(nn.Module):
    """The first forward takes the attributes of the weight into an object of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = Rows(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
        self.state = SimpleNamespace(CB=None, SCB=None)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        return nn.functional.linear(x, self.state.CB.to(x.dtype) * self.state.SCB[:, None], self.bias)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scales = self.weight.SCB if self.weight.SCB is not None else self.state.SCB
        if scales is not None:
            destination[f"{prefix}SCB"] = scales
            destination[f"{prefix}weight_format"] = torch.tensor(0, dtype=torch.uint8)
