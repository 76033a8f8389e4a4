"""Locks that no other thread holds while the process is forked.

In the child no thread could release a lock that was held then. So a fork first acquires these locks itself. Hold them
for short work only.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager


def fork_lock() -> AbstractContextManager[object]:
    """A lock for the life of the process. The thread that holds it may acquire it again."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
