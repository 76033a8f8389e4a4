"""Fork-safe locks: a fork acquires them first, so that none is left locked in the child.

No thread of the child could release a lock that another thread held during the fork. Hold these locks only briefly.
"""

from __future__ import annotations

import os

from streams import waiting


def fork_lock() -> waiting.RLock:
    """Return a reentrant lock that lives as long as the process."""
    lock = waiting.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
