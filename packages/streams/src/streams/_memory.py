"""Keep freed memory of the CPU for the next allocation."""

import ctypes
import sys

# The numbers are of the GNU C library's malloc.h; its manual has a page on each (mallopt).
_SETTINGS = {
    -3: 2**25,  # M_MMAP_THRESHOLD, its maximum: larger blocks have a mapping each, which is freed at once
    -1: 2**30,  # M_TRIM_THRESHOLD: free bytes at the end of a heap that are not returned
    -2: 2**26,  # M_TOP_PAD: bytes by which a heap grows, and which stay when it shrinks
}


def keep_memory() -> bool:
    """Make the C library keep freed memory for later allocations.

    By default it returns much of it to the system after every step, and gets it again page by page, which the threads
    of a process do one at a time. The cost: the process does not become smaller again. Call it at the start of the
    process. It works with the GNU C library only; elsewhere nothing happens.

    Returns:
        True if the C library took all settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    taken = [mallopt(setting, value) == 1 for setting, value in _SETTINGS.items()]
    return all(taken)
