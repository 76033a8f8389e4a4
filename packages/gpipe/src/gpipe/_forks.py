"""Locks that no other thread holds at the moment in which the process is forked.

A lock that is held then stays so in the child, where nobody is left to release it, and what it protects is half-way
between two states. So a fork waits until it has these locks itself: for short work only.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager


def fork_lock() -> AbstractContextManager[object]:
    """A lock for the life of the process, which the thread that holds it may take again."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
