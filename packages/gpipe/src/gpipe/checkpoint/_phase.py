"""Query whether the current layer runs in a checkpointed forward or in its recomputation.

The first forward of a checkpointed cell frees its graph afterwards. It does not run under ``no_grad``, because torch
would choose different kernels.
"""

from __future__ import annotations

from .._current import current


def is_checkpointing() -> bool:
    """Return True in a forward that will be recomputed.

    Returns:
        False outside pipes, and if there will be no backward.
    """
    return current.work.phase == "checkpointing"


def is_recomputing() -> bool:
    """Return True inside a recomputation, where layers can skip side effects such as counting or logging.

    Returns:
        False outside pipes.
    """
    return current.work.phase == "recomputing"
