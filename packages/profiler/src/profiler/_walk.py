"""Run the layers one at a time, each on the detached output of the previous one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from microbatch import Batch
from streams import add_note

from ._skips import SkipStore, routed
from .sandbox import detach


class Visit(NamedTuple):
    """A layer that is ready to run.

    Attributes:
        name: the name of the layer.
        original: the layer of the caller's module.
        layer: the copy that runs.
        input: the detached output of the previous layer. Pass it through ``enter_batch`` before the forward.
        skips: the tensors that earlier layers stashed.
    """

    name: str
    original: nn.Module
    layer: nn.Module
    input: Batch
    skips: SkipStore

    def forward(self, entered: Batch) -> tuple[Batch, list[torch.Tensor]]:
        """Return the output, and the output and skip tensors that require grad, where the backward starts."""
        with routed(self.layer, self.skips):
            output = entered.call(self.layer)
        return output, [y for y in (*output, *self.skips.stashed()) if y.requires_grad]


Step = Callable[[Visit], Batch]
"""A function that runs the forward of a layer, perhaps its backward, and returns the output."""


def walk(chain: nn.Sequential, copied: Callable[[nn.Module], nn.Module], batch: Batch, step: Step) -> None:
    """Call `step` for every layer of `chain`, with a copy of the layer from `copied`; `batch` is the first input.

    Each layer gets the detached output of the previous one. No reference to a copy remains when the next is created.
    """
    skips = SkipStore()
    for name, original in zip(chain._modules, chain, strict=True):
        with _noting_layer(name, original, batch):
            batch = step(Visit(name, original, copied(original), batch, skips))
            detach(batch)
            skips.detach()


@contextmanager
def _noting_layer(name: str, layer: nn.Module, batch: Batch) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        shapes = [f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}" for x in batch]
        found = ", ".join(shapes) or "without tensors"
        add_note(error, f"while profiling layer {name!r} ({type(layer).__name__}) on input {found}")
        raise
