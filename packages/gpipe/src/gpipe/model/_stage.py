"""A stage of a model: its part, and the recomputations of its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import nn

from ..engine._recomputation import Recomputation
from ..engine._stage import Stage
from ..module._init._model import Own
from ..skip import SkipLayout
from ._called import answered
from ._pick import Pick


class ModelStage(Stage):
    """The part of a model on a device.

    Attributes:
        has_told: whether it was logged that a later stage computes one of its blocks.
    """

    def __init__(self, index: int, module: nn.Module, device: torch.device, layout: SkipLayout) -> None:
        super().__init__(index, module, device, layout, 0)
        self.has_told = False
        self._recomputations: dict[nn.Module, Recomputation] = {}

    @property
    def layers(self) -> str:
        """The names of the first and the last module, for messages."""
        names = [name for name, module in self.module.named_children() if not isinstance(module, Own)]
        return " to ".join(f"'{name}'" for name in dict.fromkeys([*names[:1], *names[-1:]])) or "none"

    def recomputation_of(self, block: nn.Module) -> Recomputation:
        if block not in self._recomputations:
            self._recomputations[block] = Recomputation(block)
        return self._recomputations[block]


class Divided(NamedTuple):
    """A model, its named blocks, its stages, and what is returned of its output."""

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    stages: Sequence[ModelStage]
    pick: Pick

    def answering(self) -> AbstractContextManager[None]:
        """Return a context in which stages, or a replay, handle the calls of blocks."""
        stages = {
            module: stage.index
            for stage in self.stages
            for name, module in self.blocks.items()
            if stage.module._modules.get(name) is module
        }
        return answered(self.blocks, stages)
