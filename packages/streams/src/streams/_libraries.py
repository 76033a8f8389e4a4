"""Functions of the native libraries that torch is linked with."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

_LIBRARY = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(sys.platform, "libtorch_cpu.so")


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
