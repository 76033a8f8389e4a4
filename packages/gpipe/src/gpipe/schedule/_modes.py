"""Which micro-batches of each stage are checkpointed: those with a number below its stop."""

from __future__ import annotations

from collections.abc import Sequence

Stops = int | Sequence[int]
"""The first micro-batch that is not checkpointed: one number for all stages, or one for each."""

CHECKPOINT_MODES = ("always", "except_last", "never")


def checkpoint_stops(checkpoint: str | Sequence[str], microbatches: int, stages: int) -> tuple[int, ...]:
    """The stop of each stage, under one mode for all stages, or one for each.

    Args:
        checkpoint: ``"always"``, ``"except_last"`` or ``"never"``, or a list of these, one for each stage.
        microbatches: the number of micro-batches.
        stages: the number of stages.

    Returns:
        For each stage the first micro-batch that it does not checkpoint.

    Raises:
        ValueError: ``checkpoint`` is not a mode, or a list of another length.

    >>> checkpoint_stops(["always", "except_last", "never"], 4, 3)
    (4, 3, 0)
    """
    modes = [checkpoint] * stages if isinstance(checkpoint, str) else list(checkpoint)
    if len(modes) != stages:
        raise ValueError(f"checkpoint: expected a mode for each of {stages} stages, got {len(modes)}: {modes}")
    for mode in modes:
        if mode not in CHECKPOINT_MODES:
            raise ValueError(f"checkpoint: expected one of {', '.join(map(repr, CHECKPOINT_MODES))}, got {mode!r}")
    stop = {"always": microbatches, "except_last": max(0, microbatches - 1), "never": 0}
    return tuple(map(stop.__getitem__, modes))


def stop_of_each(checkpoint_stop: Stops, stages: int) -> tuple[int, ...]:
    """``checkpoint_stop`` for each stage; ValueError if it is a list of another length."""
    if isinstance(checkpoint_stop, int):
        return (checkpoint_stop,) * stages
    if len(checkpoint_stop) != stages:
        raise ValueError(
            f"checkpoint_stop: expected a number, or one for each of {stages} stages, got {len(checkpoint_stop)}"
        )
    return tuple(checkpoint_stop)
