"""A stage: the layers of a partition on their device, and facts about them learned from earlier runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streams import has_streams

from .._current import current, doing
from ..skip import SkipLayout
from ..skip.layout import skippables
from ..skip.namespace import Key
from ..values._constants import expect_plain
from ..values._leaves import Arguments
from ._offloaded import Guests
from ._recomputation import Recomputation

_log = logging.getLogger("gpipe")


def build_stages(modules: Sequence[nn.Module], devices: Sequence[torch.device], layout: SkipLayout) -> list[Stage]:
    """Return one stage per module."""
    stages: list[Stage] = []
    for j, (module, device) in enumerate(zip(modules, devices, strict=True)):
        first = stages[-1].numbers.stop if stages else 0
        stages.append(Stage(j, module, device, layout, first))
    return stages


class Stage:
    """A partition on its device, with facts learned from earlier runs. Only one run is active at a time.

    Args:
        first: the number of layers of the model before this stage.

    Attributes:
        index: the index of the stage among all stages.
        numbers: the indices of its layers in the model; a single one if ``module`` is called as a whole.
        pops, stashes: the skips received from other stages, and sent to them.
        is_direct: whether the layers can be called directly, because none uses skips.
        recomputation: recomputes the stage as a whole.
        hooked: whether layers have put hooks on tensors or nodes of their graph. A split backward would call some
            twice.
        runs_whole: whether a split of the backward was scheduled, but not possible.
        guests: the copies of its parameters, if these are on the host; None if they are on its device.
    """

    def __init__(self, index: int, module: nn.Module, device: torch.device, layout: SkipLayout, first: int) -> None:
        self.index = index
        # Random numbers depend on layer indices, but only a StageLayers reports which of its layers is computing.
        layers = len(module._modules) if isinstance(module, StageLayers) else 1
        self.numbers = range(first, first + max(layers, 1))
        self.module = module
        # All CPUs are one device. Their index only determines which stages share a worker.
        self.device = torch.device("cpu") if device.type == "cpu" else device
        self.on_accelerator = has_streams(device)
        # Only skips between stages, because layers of the same stage share a store.
        self.pops = [route.key for route in layout.routes if route.target == index]
        self.stashes = [route.key for route in layout.routes if route.source == index]
        self.is_direct = not any(True for _ in skippables(module))
        self.recomputation = Recomputation(module)
        self.hooked = False
        self.runs_whole = False
        self.guests: Guests | None = None

    def call(self, value: Any) -> Any:
        """Return the output of the layers for ``value``; incoming and outgoing skips follow the value in a tuple."""
        store: dict[Key, Any] = {}  # one store per cell: skips of a failed cell are freed with it
        if self.pops:
            value, *skips = value
            store.update(zip(self.pops, skips, strict=True))
        args, kwargs = (value.args, value.kwargs) if isinstance(value, Arguments) else ((value,), {})
        if self.is_direct:
            output = self.module(*args, **kwargs)
        else:
            with doing(skips=store):
                output = self.module(*args, **kwargs)
        if not isinstance(output, Tensor):
            expect_plain(output, self.index)
        if not self.stashes:
            return output
        lost = [name for namespace, name in self.stashes if (namespace, name) not in store]
        if lost:
            raise RuntimeError(f"{lost[0]!r} must be stashed but has not been: the layer that does so was not called")
        return output, *[store.pop(key) for key in self.stashes]

    def run_whole(self) -> None:
        """Record that the backward of this stage cannot be split; warn once."""
        if not self.runs_whole:
            self.runs_whole = True
            _log.warning(
                "the backward of partition %d cannot be split into inputs and weights; it runs whole", self.index
            )

    @property
    def layers(self) -> str:
        """The names of the first and the last layer, for messages."""
        names = [name for name, _ in self.module.named_children()]
        ends = names if len(names) < 2 else (names[0], names[-1])
        return " to ".join(f"'{name}'" for name in ends) or "none"

    @property
    def recomputed(self) -> nn.Module:
        """Contains all modules that a recomputation of this stage may call."""
        return self.module

    def elsewhere(self) -> str:
        """Describe a parameter or buffer that is not on the device of its stage; empty if there is none."""
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            there = tensor.device
            if self.guests is not None and isinstance(tensor, nn.Parameter):
                continue
            # Torch ignores the index of a CPU device.
            if there.type != self.device.type or (there.type != "cpu" and there.index != self.device.index):
                return f"{name!r} of partition {self.index} is on {there}, expected {self.device}"
        return ""


class StageLayers(nn.Sequential):
    """The layers of one stage under their own names. The first layer may take several arguments.

    While they compute, it stores the index of the current layer in the random numbers of the cell.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A compiled partition counts as one layer; otherwise it would be recompiled for each cell. is_compiling() would
        # be true while any thread compiles.
        rng = None if torch.compiler.is_dynamo_compiling() else current.work.rng
        # A pipe inside a layer also has partitions, but the indices refer to the cell's own partition.
        rng = None if rng is None or rng.module is not self else rng
        value = None
        for k, layer in enumerate(self._modules.values()):
            if rng is not None:
                rng.at = k
            value = layer(value) if k else layer(*args, **kwargs)
        if rng is not None:
            rng.at = -1
        return value
