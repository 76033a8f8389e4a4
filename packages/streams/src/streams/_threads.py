"""Control the intra-op threads of the current thread: their number and OpenMP's helper threads."""

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import _waiting as waiting

_LIBRARY = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(sys.platform, "libtorch_cpu.so")
_PROCESS = os.getpid()
_SOFT = 1  # omp_pause_soft of OpenMP 5.0, which keeps thread-local data


def limit_threads(number: int) -> None:
    """Set the number of threads that CPU operations of the calling thread use.

    Unlike ``torch.set_num_threads``, it does not affect other threads, including threads that start later.

    Args:
        number: the number of threads including the calling one, at least 1.

    Raises:
        TypeError: `number` is not an int.
        ValueError: `number` is below 1, or does not fit into a C int.

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
    # Torch initializes a thread at its first computation or query, which would overwrite an earlier setting.
    before = torch.get_num_threads()
    # Call the C functions, because torch.set_num_threads also changes the default of threads that start later.
    openmp, mkl = native("omp_set_num_threads"), native("MKL_Set_Num_Threads_Local")
    if openmp is None:
        # This call changes this thread and the process default; a temporary thread then restores the process default.
        torch.set_num_threads(number)
        thread = waiting.Thread(target=torch.set_num_threads, args=(before,))
        thread.start()
        thread.join()
        return
    for setter in filter(None, (openmp, mkl)):
        setter(number)


def pause_helpers() -> bool:
    """Stop the helper threads that intra-op parallelism has started for this thread.

    After a parallel operation, OpenMP's helpers spin for some milliseconds, which takes cores from other threads. The
    next parallel operation of this thread restarts its helpers, which takes tens of microseconds per helper. The call
    does nothing inside a parallel region, in a forked process, or if torch does not use OpenMP.

    Returns:
        True if OpenMP has paused its threads.
    """
    if os.getpid() != _PROCESS:
        return False  # OpenMP would wait for the parent's helpers, which do not exist here
    pause = native("omp_pause_resource_all")
    return pause is not None and pause(_SOFT) == 0


@cache
def native(name: str) -> Callable[..., Any] | None:
    """Return the C function ``name`` that torch itself would call; None if it is not found.

    The lookup starts at torch's own library, because a process may contain several OpenMP runtimes.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARY))
    except OSError:
        return None
    return getattr(library, name, None)
