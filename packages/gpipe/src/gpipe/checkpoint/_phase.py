"""Whether the calling layer runs in a checkpointed forward, or in its recomputation.

The first forward of a checkpointed cell runs like any other, and then frees its graph. It does not run under
``no_grad``: there torch chooses other kernels, and the recomputation would build the graph of another computation.
"""

from __future__ import annotations

from .._current import current


def is_checkpointing() -> bool:
    """Whether the calling layer runs in a forward that will be recomputed.

    Returns:
        False outside of pipes, and if there will be no backward.
    """
    return current.checkpointing


def is_recomputing() -> bool:
    """Whether the calling layer runs in a recomputation. Layers that count or log can skip that then.

    Returns:
        False outside of pipes.
    """
    return current.recomputing
