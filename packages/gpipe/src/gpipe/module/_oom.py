"""Repeat a step that runs out of memory, with smaller micro-batches."""

from __future__ import annotations

import gc
import inspect
import logging
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss

from streams import add_note

from .._current import current
from .._meant import did_you_mean
from ..checkpoint._snapshot import Slot
from ..engine._failed_cell import came_late, failed_cell, is_out_of_memory
from ..engine._undo import Undo
from ..schedule import Schedule
from ._arguments import first_line
from ._cut import Checked, cut, expect_proportional
from ._training import LossOptions

Result = TypeVar("Result")

_log = logging.getLogger("gpipe")

CHOICES = ("raise", "smaller chunks")
"""The values of ``on_oom``."""


def expect_retry(on_oom: Any, schedule: Schedule | str, options: LossOptions) -> None:
    """Raise unless a step gives the same results with other numbers of chunks.

    Raises:
        ValueError: ``on_oom`` is not one of :data:`CHOICES`; the schedule or the loss is for a certain number of
            chunks.
        RuntimeError: a layer of a pipe calls this; it may have drawn random numbers, and will be recomputed itself.
    """
    if on_oom not in CHOICES:
        known = ", ".join(map(repr, CHOICES))
        raise ValueError(f"on_oom must be one of {known}; got {on_oom!r}{did_you_mean(str(on_oom), CHOICES)}")
    if isinstance(schedule, Schedule):
        raise ValueError(
            "on_oom='smaller chunks' needs the name of a schedule; one of your own is for a certain number of "
            "micro-batches, and has no steps for more"
        )
    _expect_any_chunks(options)
    if current.step is not None:
        raise RuntimeError(
            "on_oom='smaller chunks' inside of a layer of a pipe cannot put back what the run around it has changed; "
            "give it to the step of the outer pipe"
        )


def _expect_any_chunks(options: LossOptions) -> None:
    loss, reduction = options.loss_fn, options.reduction
    if not isinstance(loss, _Loss):
        return
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) and loss.weight is not None and loss.reduction == "mean":
        raise ValueError(
            "on_oom='smaller chunks' needs a loss that is the same for any chunks; with class weights its mean is not "
            "one over rows: let loss_fn return (sum, count), the count being the weights of the targets"
        )
    if loss.reduction in ("mean", "sum") and loss.reduction != reduction:
        raise ValueError(
            f"on_oom='smaller chunks' needs a loss that is the same for any chunks; loss_fn takes the "
            f"{loss.reduction} over the rows of a micro-batch, and reduction={reduction!r} of those: make them equal"
        )


def rows_of(inputs: Checked, chunks: int) -> list[int]:
    """The rows of each micro-batch for a number of chunks.

    Raises:
        ValueError: ``inputs`` cannot be cut into that many.
    """
    with torch.no_grad():
        batches, _ = cut(inputs, torch.device("meta"), chunks)  # where it takes no memory
    expect_proportional(batches)
    return [batch.rows[0] for batch in batches]


class HasChunks(Protocol):
    """An object with a number of chunks, such as a pipe."""

    chunks: int


class Attempts(Generic[Result]):
    """A step, and what is needed to repeat it.

    Args:
        pipe: the pipe, whose chunks are changed.
        step: does the step, with the pipe's present number of chunks.
        rows: returns the rows of each micro-batch for a number of chunks. Raises ValueError if the mini-batch cannot be
            cut into that many.
        undo: restores what a failed step has changed, except gradients.
        modules: the layers.
    """

    def __init__(
        self,
        pipe: HasChunks,
        step: Callable[[], Result],
        rows: Callable[[int], Sequence[int]],
        undo: Undo,
        modules: Iterable[nn.Module],
    ) -> None:
        self._pipe = pipe
        self._chunks = pipe.chunks
        self._step = step
        self._rows = rows
        self._undo = undo
        self._modules = modules

    def run(self) -> Result:
        """Do the step; if it runs out of memory, repeat it with smaller micro-batches."""
        first: Exception
        try:
            return self._settled()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            first = error
        try:
            # Outside of the handler: the error there refers to frames, which refer to what was computed.
            return self._again(first)
        finally:
            del first  # a reference cycle with this frame

    def _settled(self) -> Result:
        found = self._step()
        self._undo.settle()
        return found

    def _again(self, first: Exception) -> Result:
        self._put_back(first)
        chunks = self._smaller(first)
        free(first)
        self._say(first, chunks)
        try:
            self._pipe.chunks = chunks
            return self._settled()
        except Exception as error:
            self._pipe.chunks = self._chunks
            if not is_out_of_memory(error) or came_late(error):
                add_note(error, f"the step was being done again with chunks={chunks}, because memory had run out")
                raise
            second = error
        self._put_back(first)
        how = f"{type(second).__name__}: {first_line(second)}"
        add_note(first, f"it was done again with chunks={chunks}, which ran out of memory too: {how}")
        free(second)
        raise first

    def _put_back(self, error: Exception) -> None:
        """Restore the state before the step; if that is impossible, raise ``error`` with a note that says why."""
        if came_late(error):
            add_note(error, "it is not done again: all micro-batches were through, and gradients were being added up")
            raise error
        lost = self._undo.put_back()
        if lost:
            add_note(error, f"it is not done again: what the layers changed cannot be put back ({_names(lost)})")
            raise error

    def _smaller(self, error: Exception) -> int:
        rows = self._rows(self._chunks)
        for size in range(-(-max(rows) // 2), 0, -1):
            chunks = -(-sum(rows) // size)
            if size < max(rows) and self._cuts(chunks):
                return chunks
        reason = "a micro-batch is a single row already" if max(rows) < 2 else "its rows cannot be cut into more"
        add_note(error, f"it is not done again with more chunks: {reason}")
        raise error

    def _cuts(self, chunks: int) -> bool:
        try:
            return bool(self._rows(chunks))
        except ValueError:
            return False

    def _say(self, error: Exception, chunks: int) -> None:
        place = failed_cell(error)
        norms = any(
            isinstance(each, _NormBase) and each.training for module in self._modules for each in module.modules()
        )
        _log.warning(
            "%s ran out of memory with chunks=%d (micro-batches of %d rows); the step is done again with chunks=%d (%d "
            "rows), which the pipe keeps%s",
            place or "the pipe",
            self._chunks,
            max(self._rows(self._chunks)),
            chunks,
            max(self._rows(chunks)),
            "; batch norm normalises these smaller micro-batches, each by itself" if norms else "",
        )


def free(error: BaseException) -> None:
    """Free what the frames of ``error`` refer to, and memory that torch caches."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            _clear(each)
            left += [each.__cause__, each.__context__]
    gc.collect()
    if torch.accelerator.is_available():
        with suppress(RuntimeError):  # a backend whose allocator keeps nothing has no way to ask it
            torch.accelerator.empty_cache()


def _clear(error: BaseException) -> None:
    """Clear the frames of ``error`` that have ended, and those that called them.

    The traceback of a worker's error ends where it was caught; but each frame refers to the frame that called it.
    """
    traceback.clear_frames(error.__traceback__)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller = frame.f_back
        while caller is not None:
            if not caller.f_code.co_flags & _SUSPENDS:  # clearing one that is suspended would end it
                with suppress(RuntimeError):  # it is still running
                    caller.clear()
            caller = caller.f_back


_SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _names(slots: Sequence[Slot]) -> str:
    return ", ".join(f"'{slot.name}' of {type(slot.owner).__name__}" for slot in slots)
