"""Run compiled layers uncompiled: compiled code creates storages that dispatch modes do not see."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

import torch


def uncompiled() -> AbstractContextManager[object]:
    """A context in which compiled modules run uncompiled; they stay compiled for others."""
    # Unless the compiler's front end was imported, which takes long, nothing can have been compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
