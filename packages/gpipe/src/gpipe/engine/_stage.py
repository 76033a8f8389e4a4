"""A stage: the layers of a partition, or of a piece of one, their device, and what runs have shown about them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import count
from weakref import WeakKeyDictionary

import torch
from torch import nn

from streams import has_streams

from ..skip import SkipLayout
from ..skip._layout import skippables
from ._facts import StageFacts

_log = logging.getLogger("gpipe")


def stages_of(
    modules: Iterable[nn.Module],
    devices: Iterable[torch.device],
    layout: SkipLayout,
    pieces: Iterable[tuple[int, bool | None]] | None = None,
) -> list[Stage]:
    """A stage for each of ``modules``, whose layers are numbered through.

    Args:
        modules: the layers of each stage.
        devices: the device of each.
        layout: the stages between which skips go.
        pieces: for each stage, its partition, and whether it is recomputed. By default each is a partition of its own.
    """
    stages: list[Stage] = []
    known = ((j, None) for j in count()) if pieces is None else iter(pieces)
    for j, (module, device) in enumerate(zip(modules, devices, strict=True)):
        stages.append(Stage(j, module, device, layout, stages[-1].numbers.stop if stages else 0, *next(known)))
    return stages


class Stage:
    """A partition, or a piece of one, on its device, for the life of its pipe.

    Args:
        first: the number of layers of the model before this stage.

    Attributes:
        index: the number of the stage among all stages.
        partition: the number of its partition; equal to ``index`` unless a partition is in pieces.
        recomputed: for a piece, whether it is checkpointed; None for a whole partition, for which its mode decides.
        numbers: the numbers of its layers in the model; one number if ``module`` is called as a whole.
        facts: what runs have shown so far.
        pops, stashes: the skips that come from other stages, and that go to others.
        is_direct: whether no layer uses skips, so that they can be called directly.
        on_accelerator: whether its device queues work on streams.
        module_copies: its copies of modules that an earlier stage has too.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        layout: SkipLayout,
        first: int,
        partition: int | None = None,
        recomputed: bool | None = None,
    ) -> None:
        self.index = index
        self.partition = index if partition is None else partition
        self.recomputed = recomputed
        layers = len(module._modules) if getattr(module, "tells_layers", False) else 1
        self.numbers = range(first, first + max(layers, 1))
        self.module = module
        self.device = torch.device("cpu") if device.type == "cpu" else device
        self.on_accelerator = has_streams(device)
        self.pops = [route.key for route in layout.routes if route.target == index]
        self.stashes = [route.key for route in layout.routes if route.source == index]
        self.is_direct = not any(True for _ in skippables(module))
        self.module_copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        self._layers_then = dict(module._modules)
        self.facts = StageFacts()

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
