"""A run cannot be recorded in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def expect_no_capture(devices: Iterable[torch.device]) -> None:
    """Raise RuntimeError if a CUDA graph is being captured on one of ``devices``."""
    if any(device.type == "cuda" for device in devices) and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a pipeline cannot be captured in a CUDA graph: its workers wait for each other on the host, which a graph "
            "does not repeat; capture what is around it"
        )
