"""Cores for the two loops and for the ranks of torch.distributed, as gpipe's workers have them."""

from __future__ import annotations

import os


def take_share(k: int, of: int) -> None:
    """Bind the calling thread, and what it starts, to the k-th of so many shares of the cores it may use.

    As in gpipe nobody is bound where there are too few cores, or where `GPIPE_PIN_WORKERS=0` forbids it.
    """
    if os.environ.get("GPIPE_PIN_WORKERS") == "0" or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= of:
        os.sched_setaffinity(0, cores[len(cores) * k // of : len(cores) * (k + 1) // of])
