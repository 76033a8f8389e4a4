"""The number of threads with which a worker's operations run, without an effect on other threads."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch

from ._libraries import native

_MOST = 2**31 - 1


def limit_threads(number: int) -> None:
    """Let CPU operations of this thread, from now on, use ``number`` threads, itself included.

    To be called by a worker about itself, at its start. Other threads, those that begin later and
    ``torch.get_num_threads()`` elsewhere stay as they are, which ``torch.set_num_threads`` does not grant.

    Args:
        number: of threads, at least 1.

    Raises:
        TypeError: `number` is no int.
        ValueError: `number` is below 1, or does not fit into an int of C.
    """
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"number of threads must be an int; got {number!r} ({type(number).__name__})")
    if number < 1:
        raise ValueError(f"number of threads must be at least 1, the calling thread itself; got {number}")
    if number > _MOST:
        raise ValueError(f"number of threads must be at most {_MOST}, as it becomes an int of C; got {number}")
    # Torch prepares a thread when that first computes, or asks; a number set before would be overwritten then.
    before = torch.get_num_threads()
    setters = _setters()
    if setters:
        for setter in setters:
            setter(number)
    else:
        _limit_and_restore(number, before)


def _limit_and_restore(number: int, before: int) -> None:
    # This sets this thread's number and the process's; a thread that ends at once puts the latter back.
    torch.set_num_threads(number)
    thread = Thread(target=torch.set_num_threads, args=(before,))
    thread.start()
    thread.join()


def _setters() -> tuple[Callable[..., object], ...]:
    """What sets the number for one thread only: of OpenMP, and of MKL where torch is built with it.

    Empty where OpenMP cannot be reached.
    """
    openmp, mkl = native("omp_set_num_threads"), native("MKL_Set_Num_Threads_Local")
    return () if openmp is None else (openmp,) if mkl is None else (openmp, mkl)
