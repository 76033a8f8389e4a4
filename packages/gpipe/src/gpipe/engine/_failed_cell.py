"""The cell in which an error was raised, and whether the error means that memory ran out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch


class FailedCell(NamedTuple):
    """The cell that raised an error, as data. (A note on the error says the same as text.)

    Attributes:
        stage: the number of the stage.
        stages: the number of stages.
        first, end: the layers of the stage: the number of the first, and one more than that of the last.
        device: the device, as text.
        microbatch: the number of the micro-batch.
        microbatches: the number of micro-batches.
        kind: the kind of the action: "forward", "backward" and so on.
        checkpoint_stop: micro-batches below this number were checkpointed.
        schedule: the name of the schedule; "own" for one of the caller's.
        split: the stages whose backward the schedule splits.
        flags: for a stage in pieces, whether each of its layers is checkpointed.
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
    """Remember ``cell`` for ``error``; :func:`failed_cell` returns it."""
    error.gpipe_failed_cell = cell  # type: ignore[attr-defined]


def failed_cell(error: BaseException) -> FailedCell | None:
    """The cell that raised ``error``; None if it was not raised in a run of a pipe."""
    return getattr(error, "gpipe_failed_cell", None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or an error that caused it, says that a device or the host has no memory left."""
    return any(isinstance(each, (torch.OutOfMemoryError, MemoryError)) or _says_so(each) for each in causes(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, the error that caused it, and so on."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _says_so(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


# Errors that torch raises as a plain RuntimeError: those of the CPU's allocator, on Linux and on Windows, of drivers,
# and of libraries that allocate without torch's allocator.
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
