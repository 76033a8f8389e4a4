"""A stage: the layers of a partition on their device, for the life of a pipe, and what runs have shown about them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from streams import has_streams

from .._current import current, doing
from ..skip import SkipLayout
from ..skip.layout import skippables
from ..skip.namespace import Key
from ..values._constants import expect_plain
from ..values._leaves import Arguments, as_value
from ._recomputation import Recomputation

_log = logging.getLogger("gpipe")


def stages_of(
    modules: Sequence[nn.Module],
    devices: Sequence[torch.device],
    layout: SkipLayout,
    blocks: Mapping[int, Sequence[range]] = MappingProxyType({}),
) -> list[Stage]:
    """A stage for each of ``modules``; ``blocks`` are the numbers of those of its layers that are recomputed apart."""
    stages: list[Stage] = []
    for j, (module, device) in enumerate(zip(modules, devices, strict=True)):
        first = stages[-1].numbers.stop if stages else 0
        stages.append(Stage(j, module, device, layout, first, blocks.get(j, ())))
    return stages


class Stage:
    """A partition on its device. What runs have shown is kept from run to run; runs of a pipe take turns.

    Args:
        first: the number of layers of the model before this stage.
        blocks: the numbers, among the layers of the stage, of those that are recomputed apart from others.

    Attributes:
        index: the number of the stage among all stages.
        numbers: the numbers of its layers in the model; one number if ``module`` is called as a whole.
        pops, stashes: the skips that come from other stages, and that go to others.
        is_direct: whether no layer uses skips, so that they can be called directly.
        recomputation: what recomputing the stage as a whole needs.
        hooked: whether layers have put hooks on tensors or nodes of their graph; a split backward would call some
            twice.
        runs_whole: whether the backward could not be split in a schedule that splits it.
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
        # Random numbers depend on the numbers of layers. Only a partition says which of its layers computes.
        layers = len(module._modules) if isinstance(module, StageLayers) else 1
        self.numbers = range(first, first + max(layers, 1))
        self.module = module
        # Numbered CPUs are one device; their numbers only say which stages share a worker.
        self.device = torch.device("cpu") if device.type == "cpu" else device
        self.on_accelerator = has_streams(device)
        # Only skips between stages: within a stage, stash and pop share a store.
        self.pops = [route.key for route in layout.routes if route.target == index]
        self.stashes = [route.key for route in layout.routes if route.source == index]
        self.is_direct = not any(True for _ in skippables(module))
        self.recomputation = Recomputation(module)
        self.blocks = {numbers: Recomputation(_layers(module, numbers)) for numbers in blocks}
        self.hooked = False
        self.runs_whole = False

    def call(self, value: Any) -> Any:
        """The output of the layers for ``value``: with the skips from other stages behind it, and those to others."""
        store: dict[Key, Any] = {}  # one store for each cell: a failed cell's skips are freed with it
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
        """Remember that the backward of this stage cannot be split; warn once."""
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

    def elsewhere(self) -> str:
        """A parameter or buffer that is not on the device of its stage, in words."""
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            there = tensor.device
            # Torch knows no numbers of CPUs.
            if there.type != self.device.type or (there.type != "cpu" and there.index != self.device.index):
                return f"{name!r} of partition {self.index} is on {there}, expected {self.device}"
        return ""


def _layers(module: nn.Module, numbers: range) -> nn.Sequential:
    found = nn.Sequential()  # without arguments, since a layer may have the name of an attribute
    found._modules.update(islice(module.named_children(), numbers.start, numbers.stop))
    return found


class StageLayers(nn.Sequential):
    """The layers of one stage under their own names. The first layer may take several arguments.

    It tells the random numbers of its cell which layer draws from them.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A compiled partition is one layer: its code would be compiled again for each cell. Not is_compiling(), which
        # is true while any thread compiles.
        rng = None if torch.compiler.is_dynamo_compiling() else current.work.rng
        # Another pipe inside of a layer has partitions too: the numbers are those of the cell's own.
        rng = None if rng is None or rng.module is not self else rng
        if rng is not None and current.work.blocks:
            return self._in_blocks(as_value(args, kwargs))
        value = None
        for k, layer in enumerate(self._modules.values()):
            if rng is not None:
                rng.at = k
            value = layer(value) if k else layer(*args, **kwargs)
        if rng is not None:
            rng.at = -1
        return value

    def _in_blocks(self, value: Any) -> Any:
        at = 0
        for block in current.work.blocks:
            value = self._computed(range(at, block.numbers.start), value)
            value = block.compute(partial(self._computed, block.numbers), value)
            at = block.numbers.stop
        return self._computed(range(at, len(self._modules)), value)

    def _computed(self, numbers: range, value: Any) -> Any:
        rng = current.work.rng
        assert rng is not None
        for k, layer in islice(enumerate(self._modules.values()), numbers.start, numbers.stop):
            rng.at = k
            is_call = not k and isinstance(value, Arguments)
            value = layer(*value.args, **value.kwargs) if is_call else layer(value)
        rng.at = -1
        return value
