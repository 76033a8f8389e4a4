"""Convert checkpoint modes to stops: a stage checkpoints the micro-batches below its stop."""

from __future__ import annotations

from collections.abc import Sequence

Stops = int | Sequence[int]
"""The first micro-batch that is not checkpointed: one number for all stages, or one per stage."""

CHECKPOINT_MODES = ("always", "except_last", "never", "offload")


def checkpoint_stops(checkpoint: str | Sequence[str], microbatches: int, stages: int) -> tuple[int, ...]:
    """Convert checkpoint modes to the stop of each stage.

    Args:
        checkpoint: ``"always"``, ``"except_last"``, ``"never"`` or ``"offload"``, or a list with one mode per stage.
        microbatches: the number of micro-batches.
        stages: the number of stages.

    Returns:
        The first micro-batch of each stage that is not checkpointed; 0 for ``"offload"``, which recomputes nothing.

    Raises:
        ValueError: a mode is unknown, or the list has the wrong length.

    >>> checkpoint_stops(["always", "except_last", "never"], 4, 3)
    (4, 3, 0)
    """
    modes = [checkpoint] * stages if isinstance(checkpoint, str) else list(checkpoint)
    if len(modes) != stages:
        raise ValueError(f"checkpoint: expected one mode per stage ({stages}), got {len(modes)}: {modes}")
    for mode in modes:
        if mode not in CHECKPOINT_MODES:
            raise ValueError(f"checkpoint: expected one of {', '.join(map(repr, CHECKPOINT_MODES))}, got {mode!r}")
    stop = {"always": microbatches, "except_last": max(0, microbatches - 1), "never": 0, "offload": 0}
    return tuple(map(stop.__getitem__, modes))


def offloading_stages(checkpoint: str | Sequence[str], stages: int) -> tuple[int, ...]:
    """Return the stages whose saved tensors go to the host."""
    modes = [checkpoint] * stages if isinstance(checkpoint, str) else checkpoint
    return tuple(j for j, mode in enumerate(modes) if mode == "offload")


def stop_of_each(checkpoint_stop: Stops, stages: int) -> tuple[int, ...]:
    """Return the stop of each stage, or raise ValueError if ``checkpoint_stop`` has the wrong length."""
    if isinstance(checkpoint_stop, int):
        return (checkpoint_stop,) * stages
    if len(checkpoint_stop) != stages:
        raise ValueError(
            f"checkpoint_stop: expected one number, or one per stage ({stages}), got {len(checkpoint_stop)}"
        )
    return tuple(checkpoint_stop)
