"""What tests on a GPU need: work that takes long enough to be overtaken."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cuda")
LONG = 200_000_000
"""Clock ticks: about a tenth of a second, very much longer than any launch."""


def sleep() -> None:
    """Keep the current stream busy for a while; returns at once."""
    torch.cuda._sleep(LONG)


def warm_up() -> None:
    """Load what a first launch loads, which may wait for the whole device and so hide a missing wait."""
    torch.cuda._sleep(1)
    x, y = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
    torch.add(x.fill_(1), 1, out=y)
    x.copy_(y, non_blocking=True).cpu()
    torch.cuda.synchronize()
