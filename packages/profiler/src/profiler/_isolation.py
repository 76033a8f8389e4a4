"""Protect the caller from a profile and the profile from the caller: random numbers, grad mode, autocast's cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

import streams


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """A context with gradients and the caller's autocast, which restores random generators at its end."""
    generators = torch.random.fork_rng([device] if streams.has_streams(device) else [])
    with generators, torch.inference_mode(False), torch.enable_grad(), streams.use_device(device):
        try:
            yield
        finally:
            torch.clear_autocast_cache()


def uncompiled() -> AbstractContextManager[object]:
    """A context in which compiled modules run uncompiled: what their code creates is not seen by dispatch modes."""
    # Unless the compiler's front end was imported, which takes long, nothing can have been compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
