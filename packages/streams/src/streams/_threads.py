"""The intra-op threads of one thread: their number, and the helper threads that stay after an operation."""

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import torch

_LIBRARY = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(sys.platform, "libtorch_cpu.so")
_PROCESS = os.getpid()
_SOFT = 1  # omp_pause_soft of OpenMP 5.0: thread-local data is kept


def limit_threads(number: int) -> None:
    """Set the number of threads that CPU operations of the calling thread use, itself included.

    Unlike ``torch.set_num_threads``, it has no effect on other threads and on those that begin later.

    Args:
        number: the number of threads, at least 1.

    Raises:
        TypeError: `number` is not an int.
        ValueError: `number` is below 1, or does not fit into an int of C.

    >>> before = torch.get_num_threads()
    >>> limit_threads(1)
    >>> torch.get_num_threads()
    1
    >>> limit_threads(before)
    """
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"number of threads must be an int; got {number!r} ({type(number).__name__})")
    if not 1 <= number < 2**31:
        raise ValueError(f"number of threads must be from 1, the calling thread itself, to {2**31 - 1}; got {number}")
    # Torch initialises a thread at its first computation or query; that would overwrite a number that was set before.
    before = torch.get_num_threads()
    # Called by their names in C, since torch.set_num_threads also sets the number of threads that begin later.
    openmp, mkl = native("omp_set_num_threads"), native("MKL_Set_Num_Threads_Local")
    if openmp is None:
        # This sets the number of this thread and of the process; a helper thread then restores that of the process.
        torch.set_num_threads(number)
        thread = Thread(target=torch.set_num_threads, args=(before,))
        thread.start()
        thread.join()
        return
    for setter in filter(None, (openmp, mkl)):
        setter(number)


def pause_helpers() -> bool:
    """End the helper threads that intra-op parallelism has started for this thread.

    After a parallel operation OpenMP's helpers spin for some milliseconds, which takes cores away from other threads.
    The next parallel operation of this thread starts its helpers again, which takes tens of microseconds for each. Does
    nothing inside a parallel region, if torch uses another library than OpenMP, and in a forked process.

    Returns:
        True if OpenMP has a function for this, and it was called.
    """
    if os.getpid() != _PROCESS:
        return False  # OpenMP would wait for the helpers of the parent process, which do not exist here
    pause = native("omp_pause_resource_all")
    return pause is not None and pause(_SOFT) == 0


@cache
def native(name: str) -> Callable[..., Any] | None:
    """The C function ``name`` that torch itself would call; None if it cannot be found.

    It is looked up through torch's own library, since a process may hold several OpenMP runtimes.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY))
    except OSError:
        return None
    return getattr(library, name, None)
