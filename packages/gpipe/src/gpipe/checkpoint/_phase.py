"""Whether the calling layer runs in a forward that will be repeated, or in its repetition.

The first forward of a checkpointed cell runs like any other and then lets its graph go. It does not run under
``no_grad``: torch chooses other kernels there, and the recomputation would build the graph of a computation that
never happened.
"""

from __future__ import annotations

from .._current import current


def is_checkpointing() -> bool:
    """Whether the calling layer runs in a forward whose graph will be rebuilt later.

    Returns:
        False outside of pipes, and where no backward will come.
    """
    return current.checkpointing


def is_recomputing() -> bool:
    """Whether the calling layer runs in a recomputation. Layers that count or log may want to skip it.

    Returns:
        False outside of pipes.
    """
    return current.recomputing
