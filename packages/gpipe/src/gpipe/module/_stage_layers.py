"""The layers of one stage."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from .._current import current
from ..values._leaves import Arguments
from ._keywords import as_value


class StageLayers(nn.Sequential):
    """The layers of one stage under their own names. The first layer may take several arguments."""

    tells_layers = True
    """It tells :data:`current` which layer is computed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A compiled partition is one layer: its code would be compiled again for each cell. Not is_compiling(), which
        # is true while any thread compiles.
        rng = None if torch.compiler.is_dynamo_compiling() else current.rng
        # Another pipe inside of a layer has partitions too: the numbers are those of the cell's own.
        rng = None if rng is None or rng.module is not self else rng
        if rng is not None and current.blocks:
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
        for block in current.blocks:
            value = self._computed(range(at, block.numbers.start), value)
            value = block.compute(partial(self._computed, block.numbers), value)
            at = block.numbers.stop
        return self._computed(range(at, len(self._modules)), value)

    def _computed(self, numbers: range, value: Any) -> Any:
        rng = current.rng
        assert rng is not None
        for k, layer in islice(enumerate(self._modules.values()), numbers.start, numbers.stop):
            rng.at = k
            is_call = not k and isinstance(value, Arguments)
            value = layer(*value.args, **value.kwargs) if is_call else layer(value)
        rng.at = -1
        return value
