"""A stage of a model: its part, and the recomputations of its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from ..engine._recomputation import Recomputation
from ..engine._stage import Stage
from ..module._init._model import Own
from ..skip import SkipLayout
from ._blocks import Division, map_blocks_to_stages
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

    @property
    def recomputed(self) -> nn.Module:
        """The blocks that are recomputed. Operations between blocks are not."""
        found = nn.Module()
        found._modules.update({n: each for n, each in self.module._modules.items() if each in self._recomputations})
        return found

    def get_recomputation(self, block: nn.Module) -> Recomputation:
        if block not in self._recomputations:
            self._recomputations[block] = Recomputation(block)
        return self._recomputations[block]


class DividedModel(NamedTuple):
    """A model, its division, and its stages.

    Attributes:
        pick: selects the part of its output that is returned.
        parts: the part of each stage.
        stages: the stages of this process.
        common: modules outside blocks that each process has, because they have buffers and no parameters.
        others: modules outside blocks whose parameters only some processes have, with their names as keys. A replay in
            one process needs their outputs.
        stages_of_others: the stages of these modules.
    """

    model: nn.Module
    division: Division
    pick: Pick
    parts: Sequence[nn.Module]
    stages: Sequence[ModelStage]
    common: Sequence[nn.Module] = ()
    others: Mapping[str, nn.Module] = MappingProxyType({})
    stages_of_others: Mapping[nn.Module, int] = MappingProxyType({})

    def answering(self) -> AbstractContextManager[None]:
        """Return a context in which stages, or a replay, handle the calls of blocks."""
        stages = {**self.stages_of_others, **map_blocks_to_stages(self.division)}
        return answered({**self.others, **self.division.blocks}, stages)
