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
from ._blocks import names_by_stage
from ._called import answered


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
    """A model, its named blocks, and its stages.

    Attributes:
        balance: the number of blocks of each stage.
        parts: the part of each stage.
        stages: the stages of this process.
        common: modules outside of blocks that each process has, because they have buffers and no parameters.
    """

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    balance: Sequence[int]
    parts: Sequence[nn.Module]
    stages: Sequence[ModelStage]
    common: Sequence[nn.Module] = ()

    def answering(self) -> AbstractContextManager[None]:
        """Return a context in which stages, or a replay, handle the calls of blocks."""
        return answered(self.blocks, names_by_stage(self.blocks, self.balance))
