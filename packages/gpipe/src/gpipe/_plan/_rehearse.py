"""Run one step of a plan by the engine itself, on tensors without data, and count the bytes of each device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from microbatch import Replicate, Split, flatten, gather, rules, scatter, unflatten, unwrap
from profiler.fake import FusedAttention, fake_mode

from .._gpipe import GPipe
from ..engine._loss_value import LossValue
from ..engine._settings import inline
from ..module._step import without_advice
from ..schedule import Kind, Schedule, replay
from ._bytes import DeviceBytes
from ._candidate import Candidate
from ._loss import StepLoss
from ._planned import Planned
from ._verify import peak_bytes

ACCOUNT = "bytes: those of the layers alone, added up"

MOST = 512
"""Layers times micro-batches: longer steps are not run, which would take minutes."""


def rehearsed(model: Planned, x: Any, y: Any, loss: StepLoss, way: Candidate) -> Candidate:
    """The candidate with the bytes of a rehearsal, and a note; those of the account where no step can be run.

    The ``model`` stays as it is, and may be on ``meta``.
    """
    # Twice as many as there are ever in flight, except under fill-drain, which has all of them in flight.
    few = way.chunks if way.schedule == "fill_drain" else min(way.chunks, 2 * len(way.sizes) + 2)
    if few * len(model.layers) > MOST:
        return replace(way, note=f"{ACCOUNT}; the step is too long for a rehearsal")
    # Without data, torch's kernel of an LSTM on a CPU does not tell of the memory that it keeps for the backward.
    if not way.costs.measured.apart and any(isinstance(each, nn.LSTM) for each in model.module.modules()):
        return replace(way, note=f"{ACCOUNT}; LSTMs on a CPU are not rehearsed")
    try:
        peaks = peaks_of(model, x, y, loss, way, few)
    except Exception as error:
        return replace(way, note=f"{ACCOUNT}; a rehearsal without data failed: {error!r:.200}")
    # Beside what a rehearsal finds, in one memory, there are the optimizer's state, and copies between devices.
    shared = replace(way.costs.measured, apart=False).cut(way.chunks)
    alone = shared.device_bytes(way.sizes, way.modes, way.schedule, way.split)
    found = zip(way.account, alone, peaks, strict=True)
    rehearsed = tuple(_with(need, peak + need.optimizer + need.total - own.total) for need, own, peak in found)
    return replace(way, rehearsed=rehearsed, note="bytes: those of one step of the engine on tensors without data")


def peaks_of(model: Planned, x: Any, y: Any, loss: StepLoss, way: Candidate, few: int) -> list[int]:
    """The peak of each device in bytes, without the state of an optimizer, in a step of ``few`` micro-batches.

    All stages share their memory, as on a CPU: what a stage sends stays as long as the next one needs it. So the
    largest peak of several steps counts, in which the first stages, or the last ones, are as early as they can be. An
    error means that a layer needs the values of tensors.
    """
    sizes, chunks = way.sizes, way.chunks
    mode = fake_mode()
    inputs, targets = _first(model, x, chunks, few, mode), None if y is None else _first(model, y, chunks, few, mode)
    few = len(scatter(inputs, few))
    placement = way.costs.measured.placement
    pipe = tried_pipe(model, model.faked(mode), ["cpu"] * len(sizes), few, way)
    program, arguments = way.program(few), loss.without_data(whole=way.costs.measured.whole_loss)
    with closing(pipe), inline(), FusedAttention() if way.costs.measured.apart else nullcontext():
        # In its first step, a pipe finds out what its layers do.
        pipe.step(inputs, targets, **arguments, schedule=program)
        # Inline, the last stage that can do something does it. Else the first stages are ahead, or the last devices.
        paces = [4.0**j for j in range(len(sizes))], [4.0**-place for place in placement]
        steps = program, *[in_turns(program, placement, pace) for pace in paces]
        found = [peak_bytes(pipe, inputs, targets, arguments, step, placement) for step in steps]
    return [max(peaks) for peaks in zip(*found, strict=True)]


def returns_sums(model: Planned, x: Any, y: Any, loss: StepLoss) -> bool:
    """Whether the loss function returns a :class:`gpipe.LossSum`, seen in an evaluation on tensors without data.

    False if that fails.
    """
    mode, seen = fake_mode(), list[LossValue]()
    inputs, targets = _first(model, x, 1, 1, mode), None if y is None else _first(model, y, 1, 1, mode)
    try:
        with closing(model.pipe(model.faked(mode), [len(model.layers)], devices=["cpu"])) as pipe, inline():
            pipe.evaluate(inputs, targets, loss_fn=loss.watched(seen.append))
            return seen[0].count is not None
    except Exception:  # a layer needs the values of tensors
        return False


def tried_pipe(
    model: Planned, copied: nn.Module, devices: Sequence[torch.device | str], chunks: int, way: Candidate
) -> GPipe:
    """A pipe of a copy in training mode. It logs no advice on its settings, which nobody has chosen."""
    pipe = model.pipe(copied, way.sizes, devices=devices, chunks=chunks, checkpoint=way.modes)
    without_advice(pipe)
    # In evaluation mode it would neither draw masks nor recompute. Norms that are frozen in training mode stay so.
    return pipe if pipe.training else pipe.train()


def _first(model: Planned, value: Any, chunks: int, few: int, mode: Any) -> Any:
    return first(model.blank(value, mode), chunks, few)


def first(value: Any, chunks: int, few: int) -> Any:
    """The first ``few`` of the micro-batches of ``value`` together."""
    bare, spec = unwrap(value)
    leaves, tree = flatten(gather(scatter(bare, chunks, spec)[:few], spec))
    return unflatten([_ruled(*each) for each in zip(leaves, rules(bare, spec), strict=True)], tree)


def _ruled(leaf: Any, rule: Any) -> Any:
    if leaf is None or not isinstance(rule, Split):
        return leaf if leaf is None else Replicate(leaf)
    # One with counts has been refused when it was measured. A plain target stays one, as torch's losses take it.
    return Split(leaf, rule.dim) if rule.dim else leaf


def in_turns(program: Schedule, placement: Sequence[int], seconds: Sequence[float]) -> Schedule:
    """The same steps in one thread, in the order in which they begin if the actions of each stage take ``seconds``."""
    spans = replay(program.on(placement), [dict.fromkeys(Kind, each) for each in seconds])
    return Schedule(program, (tuple(sorted(spans, key=lambda step: spans[step].start)),))


def _with(need: DeviceBytes, found: int) -> DeviceBytes:
    """The same kinds with ``found`` in all: what is left is transient."""
    left = max(0, found - need.parameters - need.optimizer)
    gradients = min(need.gradients, left)
    activations = min(need.activations, left - gradients)
    return replace(need, gradients=gradients, activations=activations, transient=left - gradients - activations)
