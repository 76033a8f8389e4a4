"""Add notes to the error of a failed action: where it happened, and how to solve it."""

from __future__ import annotations

import re

import torch

from streams import add_note

from ..schedule import Action, Kind
from ..values._describe import shapes
from ..values._leaves import Activation
from ._stage import Stage


def explain_error(
    error: BaseException, stage: Stage, action: Action, microbatches: int, inputs: Activation | None
) -> BaseException:
    """Return ``error`` of ``action`` with notes, or an error that explains it better.

    Args:
        microbatches: the number of micro-batches of the run.
        inputs: the inputs of the cell, if it has any yet.
    """
    if action.kind in _BACKWARDS and (found := explain_second_backward(error)):
        error, found.__cause__ = found, error
    # The error of a pipe inside a layer already has this note.
    is_first = _NEEDS_LESS not in getattr(error, "__notes__", ())
    if action.kind == Kind.LOSS:
        place = f"the loss of all {microbatches} micro-batches"
    else:
        values = None if inputs is None else inputs.value
        place = f"micro-batch {action.microbatch} of {microbatches}, {action.kind}; input: {shapes(values)}"
    add_note(error, f"in partition {stage.index} (layers {stage.layers}) on {stage.device}, {place}")
    if is_first and is_out_of_memory(error):
        add_note(error, _NEEDS_LESS)
    elif isinstance(error, torch.AcceleratorError):
        add_note(error, _TOLD_LATE)
    if "saved tensor hooks" in str(error):
        add_note(error, _HOOKED)
    if "device" in str(error) and (moved := stage.elsewhere()):
        add_note(error, f"{moved}{_MOVED}")
    return error


def explain_second_backward(error: BaseException) -> RuntimeError | None:
    """Return the error that explains a second backward through the same graph; None for any other error.

    Each cell and each loss has only one backward, so two of them must have used a common graph.
    """
    is_second = type(error) is RuntimeError and "backward through the graph a second time" in str(error)
    return RuntimeError(_USED_UP) if is_second else None


_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)

_NEEDS_LESS = (
    "memory ran out: set more chunks (pipe.chunks), checkpoint this partition (pipe.checkpoint), or make the pipe from "
    "gpipe.plan(model, sample, devices, memory=...) with less than this device has"
)

_TOLD_LATE = (
    "a device reports an error of its kernels at a later call, so that an earlier micro-batch, or another partition on "
    "this device, may have caused it; CUDA_LAUNCH_BLOCKING=1 in the environment makes each call wait for its kernels"
)

_HOOKED = (
    "layers are computed under saved-tensor hooks with checkpoint='offload', and blocks of a model that are recomputed "
    "too; use checkpoint='never' for this partition"
)

_USED_UP = (
    "a layer uses a tensor that was computed with gradients outside of the pipeline, whose graph the first "
    "micro-batch has used up: compute it inside the layer, pass it to the pipe as an input, or detach it; or a layer "
    "has left a tensor with its graph in an attribute or a list, and the loss has used that graph up: return it from "
    "the layer, or leave its detach()"
)

_MOVED = (
    ": the model was moved after its pipe was made; a new pipe, GPipe(pipe[:], pipe.balance, devices=pipe.devices), "
    "moves all layers back; to have the model elsewhere too, move a copy of it"
)

# Errors that torch raises as a plain RuntimeError: from the CPU allocator, from drivers, and from libraries that
# allocate without torch's allocator.
_TEXTS = re.compile(r"(?i)out of memory|can't allocate memory|not enough memory|ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error``, or its cause, reports that a device or the host is out of memory."""
    return any(
        isinstance(each, torch.OutOfMemoryError | MemoryError)
        or (isinstance(each, RuntimeError) and _TEXTS.search(str(each)) is not None)
        for each in (error, error.__cause__)
    )
