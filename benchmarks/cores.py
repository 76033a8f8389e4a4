"""Cores for the two loops and for the ranks of torch.distributed, as gpipe's workers have them."""

from __future__ import annotations

from gpipe.engine._cores import bind, shares, usable


def take_share(k: int, of: int) -> None:
    """Bind the calling thread, and what it starts, to the k-th of so many shares of the cores it may use."""
    bind(shares(usable(), of)[k])
