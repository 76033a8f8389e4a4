"""What becomes of memory on the CPU between one step and the next.

It stands beside the workers because they are who waits: threads that get memory from the system at the same time do so
one after the other.
"""

from __future__ import annotations

import ctypes
import os

# The numbers are of the GNU C library's malloc.h; its manual has a page on each (mallopt).
_SETTINGS = {
    -3: 2**25,  # M_MMAP_THRESHOLD, at its most: from how many bytes on a block is mapped, and unmapped, by itself
    -1: 2**30,  # M_TRIM_THRESHOLD: how much may lie free at the end of a heap
    -2: 2**26,  # M_TOP_PAD: by how much a heap grows, and what is left when it shrinks
}


def keep_memory() -> bool:
    """Let the C library keep freed memory for what is allocated next; whether it does.

    Otherwise it hands much of it back to the system after every step, and gets it again page by page, which all threads
    of a process do one at a time. The price: the process stays as large as it ever was. This is for the whole process,
    and best done at its start. Only the GNU C library is asked; elsewhere, nothing happens.

    Returns:
        True if the C library took all settings.
    """
    if not _is_gnu():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    taken = [mallopt(setting, value) == 1 for setting, value in _SETTINGS.items()]
    return all(taken)


def _is_gnu() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (AttributeError, ValueError, OSError):  # no such function, name, or value
        return False
