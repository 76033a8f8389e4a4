"""Takes a batch through the layers one at a time, each cut off from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    layer: nn.Module
    input: Batch
    skips: SkipStore

    def forward(self) -> tuple[Batch, list[torch.Tensor]]:
        """The output, and the tensors among outputs and skips that a backward starts from."""
        with routed(self.layer, self.skips):
            output = self.input.call(self.layer)
        return output, [y for y in (*output, *self.skips.stashed()) if y.requires_grad]


def gradients_for(roots: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What a backward from ``roots`` starts with: ones, or for a sparse root, which has no ones, its own values."""
    return [torch.ones_like(y) if y.layout is torch.strided else y.detach().clone() for y in roots]


Step = Callable[[Visit], Batch]
"""What to do at a layer: runs its forward, perhaps its backward, and returns the output."""


def walk(module: nn.Sequential, layers: Iterator[nn.Module], batch: Batch, step: Step) -> None:
    """Does `step` at every layer of `module`, with its copy out of `layers`; `batch` goes into the first.

    Each layer gets the detached output of the one before. A failure keeps its type and says which layer it was and
    what went in.
    """
    skips = SkipStore()
    for index, (name, original) in enumerate(module._modules.items()):
        with _blaming(name, original, batch):
            layer = next(layers)
            batch = step(Visit(index, layer, enter_batch(batch), skips))
            detach(batch)
            skips.detach()
        # Else this copy and the next would be there at the same time.
        del layer


@contextmanager
def _blaming(name: str, layer: nn.Module | None, batch: Batch) -> Iterator[None]:
    """Lets errors through with a note: the layer's name, its type, the shapes of its input."""
    try:
        yield
    except Exception as error:
        shapes = ", ".join(_describe(x) for x in batch) or "without tensors"
        add_note(error, f"while profiling layer {name!r} ({type(layer).__name__}) on input {shapes}")
        raise


def _describe(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"
