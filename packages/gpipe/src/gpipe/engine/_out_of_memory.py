"""Whether an error means that memory ran out."""

from __future__ import annotations

import re

import torch

# Errors that torch raises as a plain RuntimeError: those of the CPU's allocator, of drivers, and of libraries that
# allocate without torch's allocator.
_TEXTS = re.compile(r"(?i)out of memory|can't allocate memory|not enough memory|ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or the error that caused it, says that a device or the host has no memory left."""
    return any(
        isinstance(each, torch.OutOfMemoryError | MemoryError)
        or (isinstance(each, RuntimeError) and _TEXTS.search(str(each)) is not None)
        for each in (error, error.__cause__)
    )
