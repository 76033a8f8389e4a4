"""Reject layers whose gradients for micro-batches do not add up to the gradient for the mini-batch."""

from __future__ import annotations

from torch import nn


def expect_sums(module: nn.Module, chunks: int) -> None:
    """Raise ValueError if an embedding in ``module`` has ``scale_grad_by_freq`` and there are several ``chunks``.

    This option divides the gradient of a word by its number of occurrences, which would be counted per micro-batch
    instead of in the mini-batch. Frozen layers are rejected as well, because they may be unfrozen later.
    """
    if chunks == 1:
        return
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.scale_grad_by_freq:
            raise ValueError(
                f"chunks={chunks}: {name!r} ({type(each).__name__}) has scale_grad_by_freq=True, which would count "
                "words per micro-batch instead of in the mini-batch; set it to False, or use chunks=1"
            )
