"""A stage of a model: its part, and what runs have shown of its blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..engine._recomputation import Recomputation
from ..engine._stage import Stage
from ..skip import SkipLayout


class ModelStage(Stage):
    """The part of a model on a device."""

    def __init__(self, index: int, module: nn.Module, device: torch.device, layout: SkipLayout) -> None:
        super().__init__(index, module, device, layout, 0)
        self._recomputations: dict[nn.Module, Recomputation] = {}

    def recomputation_of(self, block: nn.Module) -> Recomputation:
        if block not in self._recomputations:
            self._recomputations[block] = Recomputation(block)
        return self._recomputations[block]

    def blocks_of(self, blocks: Mapping[str, nn.Module]) -> list[nn.Module]:
        """Return those of the ``blocks`` that belong to this stage."""
        return [module for name, module in blocks.items() if self.module._modules.get(name) is module]
