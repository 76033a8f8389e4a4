"""Which cell an error came from, and whether it means that memory ran out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class FailedCell(NamedTuple):
    """The cell that raised an error, as data beside the note that says the same.

    Attributes:
        stage: its number.
        stages: how many there were.
        first, end: the layers of the stage: from the number of the first to the one behind the last.
        device: as text.
        microbatch: its number.
        microbatches: how many there were.
        kind: of the action: "forward", "backward" and so on.
        checkpoint_stop: of the stage.
        schedule: its name; "own" for one that has none.
        split: the stages whose backward it splits.
        flags: of a stage in pieces, whether each of its layers is checkpointed.
    """

    stage: int
    stages: int
    first: int
    end: int
    device: str
    microbatch: int
    microbatches: int
    kind: str
    checkpoint_stop: int
    schedule: str = "fill_drain"
    split: tuple[int, ...] = ()
    flags: tuple[bool, ...] = ()

    def __str__(self) -> str:
        return f"partition {self.stage} on {self.device}, in a {self.kind.replace('_', ' of ')}"


def mark(error: BaseException, cell: FailedCell) -> None:
    """Let :func:`failed_cell` find ``cell``."""
    error.gpipe_failed_cell = cell  # type: ignore[attr-defined]


def failed_cell(error: BaseException) -> FailedCell | None:
    """Where ``error`` came from; None if no run of a pipe raised it."""
    return getattr(error, "gpipe_failed_cell", None)


def mark_late(error: BaseException) -> None:
    """``error`` came when all micro-batches were through, and gradients were being added to those that were there."""
    error.gpipe_came_late = True  # type: ignore[attr-defined]


def came_late(error: BaseException) -> bool:
    """Whether ``error`` was marked so: then nobody can take the step back."""
    return getattr(error, "gpipe_came_late", False)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, says that a device or the host has no memory left."""
    return any(isinstance(each, (torch.OutOfMemoryError, MemoryError)) or _says_so(each) for each in causes(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, what it was raised from, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _says_so(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


# What torch raises as a plain RuntimeError: the CPU's allocator, on Linux and on Windows; drivers; and libraries that
# take memory past torch's allocator.
_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
    "CUDA out of memory",
    "HIP error: out of memory",
    "HIP out of memory",
    "XPU out of memory",
    "MPS backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
