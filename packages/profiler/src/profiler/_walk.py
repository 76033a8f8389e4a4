"""Runs the layers one at a time, each on the detached output of the one before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from microbatch import Batch
from streams import add_note

from ._enter import enter_batch
from ._sandbox import detach
from ._skips import SkipStore, routed


@dataclass(frozen=True)
class Visit:
    """One layer, ready to run."""

    index: int
    name: str
    layer: nn.Module
    input: Batch
    skips: SkipStore

    def forward(self) -> tuple[Batch, list[torch.Tensor]]:
        """The output, and the tensors among outputs and skips at which a backward begins."""
        with routed(self.layer, self.skips):
            output = self.input.call(self.layer)
        return output, [y for y in (*output, *self.skips.stashed()) if y.requires_grad]


Step = Callable[[Visit], Batch]
"""What is done at a layer: it runs the forward, perhaps the backward, and returns the output."""


def walk(module: nn.Sequential, layers: Iterator[nn.Module], batch: Batch, step: Step) -> None:
    """Does `step` for every layer of `module`, with its copy from `layers`. `batch` is the input of the first.

    Each layer gets the detached output of the one before. An error keeps its type, and gets a note that names the layer
    and its input.
    """
    skips = SkipStore()
    for index, (name, original) in enumerate(module._modules.items()):
        with _blaming(name, original, batch):
            layer = next(layers)
            batch = step(Visit(index, name, layer, enter_batch(batch), skips))
            detach(batch)
            skips.detach()
        # Otherwise this copy and the next one would be in memory at the same time.
        del layer


@contextmanager
def _blaming(name: str, layer: nn.Module | None, batch: Batch) -> Iterator[None]:
    """A context that adds a note to errors: the name and type of the layer, and the shapes of its input."""
    try:
        yield
    except Exception as error:
        shapes = [f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}" for x in batch]
        found = ", ".join(shapes) or "without tensors"
        add_note(error, f"while profiling layer {name!r} ({type(layer).__name__}) on input {found}")
        raise
