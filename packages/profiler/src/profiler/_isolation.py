"""What a profile must not disturb and must not inherit: random numbers, grad and inference mode, cast weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

import streams


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Random generators are put back afterwards; gradients are on, whatever mode the caller is in.

    Autocast is inherited, as a layer costs what it costs under it.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if streams.has_streams(device) else []))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.clear_autocast_cache)
        if device.type != "meta":
            stack.enter_context(streams.use_device(device))
        yield
