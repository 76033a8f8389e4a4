"""The number of intra-op threads of one thread."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch

from ._libraries import native

_MOST = 2**31 - 1


def limit_threads(number: int) -> None:
    """Set the number of threads that CPU operations of the calling thread use, itself included.

    A worker calls this at its start. Unlike ``torch.set_num_threads``, it has no effect on other threads, on threads
    that begin later, and on ``torch.get_num_threads()`` elsewhere.

    Args:
        number: the number of threads, at least 1.

    Raises:
        TypeError: `number` is not an int.
        ValueError: `number` is below 1, or does not fit into an int of C.
    """
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"number of threads must be an int; got {number!r} ({type(number).__name__})")
    if number < 1:
        raise ValueError(f"number of threads must be at least 1, the calling thread itself; got {number}")
    if number > _MOST:
        raise ValueError(f"number of threads must be at most {_MOST}, as it becomes an int of C; got {number}")
    # Torch initialises a thread at its first computation or query; that would overwrite a number that was set before.
    before = torch.get_num_threads()
    setters = _setters()
    if setters:
        for setter in setters:
            setter(number)
    else:
        _limit_and_restore(number, before)


def _limit_and_restore(number: int, before: int) -> None:
    # This sets the number of this thread and of the process; a helper thread then restores that of the process.
    torch.set_num_threads(number)
    thread = Thread(target=torch.set_num_threads, args=(before,))
    thread.start()
    thread.join()


def _setters() -> tuple[Callable[..., object], ...]:
    """Functions that set the number for the calling thread only: of OpenMP, and of MKL if torch is built with it.

    Empty if OpenMP's is not found.
    """
    openmp, mkl = native("omp_set_num_threads"), native("MKL_Set_Num_Threads_Local")
    return () if openmp is None else (openmp,) if mkl is None else (openmp, mkl)
