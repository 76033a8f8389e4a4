"""Layers whose gradient depends on the whole mini-batch: those of micro-batches do not add up to it."""

from __future__ import annotations

from torch import nn


def expect_sums(module: nn.Module, chunks: int) -> None:
    """Raise ValueError if a layer of ``module`` scales gradients by frequencies, and there are several ``chunks``.

    ``scale_grad_by_freq`` divides the gradient of a word by how often the word occurs: in a micro-batch, while the
    plain model counts the mini-batch. Also where the layer is frozen, since it may be trained later.
    """
    if chunks == 1:
        return
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.scale_grad_by_freq:
            raise ValueError(
                f"chunks={chunks}: {name!r} ({type(each).__name__}) has scale_grad_by_freq=True, which would count "
                "words by micro-batch, and not in the mini-batch; set that to False, or use chunks=1"
            )
