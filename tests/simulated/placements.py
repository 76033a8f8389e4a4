"""Placements of stages, and the caller's streams."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .accelerator import DEVICES, device, new_stream, using

PLACEMENTS: dict[str, tuple[int | None, ...]] = {
    "one device": (0,),
    "all on one device": (0, 0, 0),
    "two devices": (0, 1, 0),
    "three devices": (0, 1, 2),
    "the first device twice": (0, 0, 1),
    "the second device twice": (1, 1, 0),
    "CPU first": (None, 0, 1),
    "CPU last": (0, 1, None),
    "CPU between": (0, None, 1),
    "CPU twice": (0, None, None),
    "device between CPUs": (None, 0, None),
}
"""The device of each stage in each placement; None is the CPU."""

UNEVEN = ("two devices", "the first device twice", "the second device twice")
"""Placements of three stages on two workers, which "interleaved" does not support."""

STREAMS = ("default", "own", "foreign")
"""The caller's streams: the default ones, new ones, or new ones and different ones for the backward."""


def devices(name: str) -> list[torch.device]:
    return [device(k) for k in PLACEMENTS[name]]


def forward_streams(kind: str) -> AbstractContextManager[None]:
    """The streams of the caller's step."""
    return nullcontext() if kind == "default" else _ordered_streams()


def backward_streams(kind: str) -> AbstractContextManager[None]:
    """Return the context of the backward, and of work on gradients."""
    return _ordered_streams() if kind == "foreign" else nullcontext()


@contextmanager
def _ordered_streams() -> Iterator[None]:
    """Fresh streams, which wait for the current ones, as these do for them in the end: what a careful caller writes."""
    before = [torch.accelerator.current_stream(device(k)) for k in range(DEVICES)]
    fresh = [new_stream(k) for k in range(DEVICES)]
    try:
        with using(fresh):
            yield
    finally:
        for outer, inner in zip(before, fresh, strict=True):
            outer.wait_stream(inner)
