"""Whether the calling layer runs in a checkpointed forward, or in its recomputation.

A checkpointed cell's first forward frees its graph afterwards. It does not run under ``no_grad``, where torch chooses
other kernels.
"""

from __future__ import annotations

from .._current import current


def is_checkpointing() -> bool:
    """Whether the calling layer runs in a forward that will be recomputed.

    Returns:
        False outside of pipes, and if there will be no backward.
    """
    return current.work.phase == "checkpointing"


def is_recomputing() -> bool:
    """Whether the calling layer runs in a recomputation. Layers that count or log can skip that then.

    Returns:
        False outside of pipes.
    """
    return current.work.phase == "recomputing"
