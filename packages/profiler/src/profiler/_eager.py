"""Compiled code creates storages that no dispatch mode sees."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch


def uncompiled() -> AbstractContextManager[object]:
    """Whatever has been compiled runs as it was written, and stays compiled for others."""
    # Without the compiler's front end, which takes long to import, nothing can have been compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
