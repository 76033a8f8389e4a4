"""Virtual devices: stages share a physical device, and each behaves like a separate one.

Each has its own worker and streams, and links copy. So the ordering of several devices can be tested on a single one.
Random numbers are not covered, as the stages share their device's generator.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from gpipe.engine import _workers
from gpipe.engine._run import Run
from gpipe.engine._stage import Stage
from gpipe.transport import _copy
from streams import AbstractStream, is_accelerator, new_stream, use_stream, wait_stream


@contextmanager
def virtual_devices() -> Iterator[None]:
    """Place the stages of new pipes on virtual devices.

    Their streams are used only inside runs. At its start, a run's streams wait for the caller's streams, and at its end
    the caller's streams wait for them, so that memory returned to either is free.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_workers, "placement", lambda devices: tuple(range(len(devices))))
        patch.setattr(_copy, "carrier", _carrier)
        patch.setattr(Run, "_current_streams", _own_first(Run._current_streams))
        for name in ("forward", "backward", "train"):
            patch.setattr(Run, name, _between_waits(getattr(Run, name)))
        yield


class _CopyWithin(_copy.Copy):
    """Copies from a stage to another one on the same device."""

    def _move(self, tensor: Tensor) -> Tensor:
        source, target = self._source.copy, self._target.copy
        with use_stream(target):
            copy = torch.empty_like(tensor)
        # As torch does between devices.
        wait_stream(source, target)
        copy.copy_(tensor, non_blocking=True)
        wait_stream(target, source)
        return copy


def _carrier(source: _copy.Place, target: _copy.Place) -> _copy.Copy | None:
    if source.device != target.device:
        return _copy.Copy(source, target)
    return _CopyWithin(source, target) if is_accelerator(source.compute) else None


def _own_first(current_streams: Callable[[Any], list[AbstractStream]]) -> Callable[[Any], list[AbstractStream]]:
    """Return a run's stage streams when it is created, and its caller's streams when asked later, for a backward."""
    made: WeakKeyDictionary[Stage, AbstractStream] = WeakKeyDictionary()

    def own_first(run: Any) -> list[AbstractStream]:
        now = current_streams(run)
        if hasattr(run, "callers"):
            return now
        run.callers = now
        for stage in run._pipeline.stages:
            if stage not in made:
                made[stage] = new_stream(stage.device)
        return [made[stage] for stage in run._pipeline.stages]

    return own_first


def _between_waits(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method with waits between the stages' streams and the streams of the pipe's caller, before and after.

    The gradients of a backward arrive on the caller's streams.
    """

    @wraps(method)
    def between_waits(run: Any, *arguments: Any) -> Any:
        streams = list(zip(run._streams, run.callers, strict=True))
        for own, callers in streams:
            wait_stream(own, callers)
        try:
            return method(run, *arguments)
        finally:
            for own, callers in streams:
                wait_stream(callers, own)

    return between_waits
