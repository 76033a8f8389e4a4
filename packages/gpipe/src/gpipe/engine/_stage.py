"""A stage: the layers of a partition, their device, and what runs have shown about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from streams import has_streams

from ..skip import SkipLayout
from ..skip._layout import skippables
from ._facts import StageFacts
from ._recomputation import RecomputationFacts


def stages_of(
    modules: Sequence[nn.Module],
    devices: Sequence[torch.device],
    layout: SkipLayout,
    blocks: Mapping[int, Sequence[range]] = MappingProxyType({}),
) -> list[Stage]:
    """A stage for each of ``modules``, whose layers are numbered through.

    Args:
        modules: the layers of each stage.
        devices: the device of each.
        layout: the stages between which skips go.
        blocks: by stage, the numbers of those of its layers that are recomputed apart from others.
    """
    stages: list[Stage] = []
    for j, (module, device) in enumerate(zip(modules, devices, strict=True)):
        first = stages[-1].numbers.stop if stages else 0
        stages.append(Stage(j, module, device, layout, first, blocks.get(j, ())))
    return stages


class Stage:
    """A partition on its device, for the life of its pipe.

    Args:
        first: the number of layers of the model before this stage.
        blocks: the numbers, among the layers of the stage, of those that are recomputed apart from others.

    Attributes:
        index: the number of the stage among all stages.
        numbers: the numbers of its layers in the model; one number if ``module`` is called as a whole.
        blocks: for each block, what runs have shown about recomputing it.
        facts: what runs have shown so far.
        pops, stashes: the skips that come from other stages, and that go to others.
        is_direct: whether no layer uses skips, so that they can be called directly.
        on_accelerator: whether its device queues work on streams.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        layout: SkipLayout,
        first: int,
        blocks: Sequence[range] = (),
    ) -> None:
        self.index = index
        layers = len(module._modules) if getattr(module, "tells_layers", False) else 1
        self.numbers = range(first, first + max(layers, 1))
        self.module = module
        self.device = torch.device("cpu") if device.type == "cpu" else device
        self.on_accelerator = has_streams(device)
        self.pops = [route.key for route in layout.routes if route.target == index]
        self.stashes = [route.key for route in layout.routes if route.source == index]
        self.is_direct = not any(True for _ in skippables(module))
        self._layers_then = dict(module._modules)
        self.facts = StageFacts()
        self.blocks = {block: RecomputationFacts() for block in blocks}

    def expect_current(self) -> None:
        """Raise RuntimeError if a layer was replaced or moved since the forward: a recomputation would differ."""
        if self.module._modules != self._layers_then:
            now, then = self.module._modules, self._layers_then
            names = [name for name in {**then, **now} if now.get(name) is not then.get(name)]
            raise RuntimeError(
                f"layer {', '.join(map(repr, names))} was replaced or moved to another partition between the forward "
                "and the backward of a checkpointed run, whose recomputation would now compute something else; do that "
                "after backward(), or use checkpoint='never'"
            )

    @property
    def layers(self) -> str:
        """The names of the first and the last layer."""
        return first_to_last([name for name, _ in self.module.named_children()])


def first_to_last(names: Sequence[str]) -> str:
    """The first and the last of the names of layers, as text for messages."""
    ends = names if len(names) < 2 else (names[0], names[-1])
    return " to ".join(f"'{name}'" for name in ends) or "none"
