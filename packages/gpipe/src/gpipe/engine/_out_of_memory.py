"""Whether an error means that memory ran out."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or an error that caused it, says that a device or the host has no memory left."""
    return any(isinstance(each, (torch.OutOfMemoryError, MemoryError)) or _says_so(each) for each in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
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
