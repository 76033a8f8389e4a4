"""Put a dispatch mode on this thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


@contextmanager
def pushed(mode: TorchDispatchMode) -> Iterator[None]:
    """Inside, ``mode`` sees the operations of this thread.

    Unlike ``with mode``, which also flips a switch of the process that sticks when threads leave in another order than
    they came.
    """
    _push_mode(mode)
    try:
        yield
    finally:
        _pop_mode()
