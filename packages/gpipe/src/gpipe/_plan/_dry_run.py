"""Dry run: run one step of a plan in the engine on fake tensors, and count the bytes of each device."""

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
from ._arguments import OFFLOAD
from ._bytes import DeviceBytes
from ._candidate import Candidate
from ._loss import StepLoss
from ._planned import Planned
from ._verify import peak_bytes

ACCOUNT = "bytes: summed over the layers alone"

MOST = 512
"""The most layers times micro-batches. Larger dry runs would take minutes, and are skipped."""


def dry_run(model: Planned, x: Any, y: Any, loss: StepLoss, candidate: Candidate) -> Candidate:
    """Return the candidate with the bytes of a dry run and a note. If no step can be run, its bytes are estimates.

    The ``model`` is unchanged, and may be on ``meta``.
    """
    # Twice as many as are ever in flight; under fill-drain, all of them are.
    few = (
        candidate.chunks
        if candidate.order or candidate.schedule == "fill_drain"
        else min(candidate.chunks, 2 * len(candidate.sizes) + 2)
    )
    if few * len(model.layers) > MOST:
        return replace(candidate, note=f"{ACCOUNT}; the step is too long for a dry run")
    # On fake tensors, torch's CPU kernel of an LSTM does not show the memory that it saves for the backward.
    if not candidate.costs.measured.separate_memory and any(
        isinstance(each, nn.LSTM) for each in model.module.modules()
    ):
        return replace(candidate, note=f"{ACCOUNT}; there is no dry run for LSTMs on a CPU")
    if OFFLOAD in candidate.modes:
        return replace(candidate, note=f"{ACCOUNT}; there is no dry run with checkpoint='offload'")
    try:
        peaks = measure_peaks(model, x, y, loss, candidate, few)
    except Exception as error:
        return replace(candidate, note=f"{ACCOUNT}; the dry run on fake tensors failed: {error!r:.200}")
    # A dry run uses one memory, so add the optimizer's state and the copies between devices. It counts kept outputs.
    measured = candidate.costs.measured
    accounts = [
        replace(candidate, costs=other.cut(candidate.chunks)).account
        for other in (replace(measured, keeps_outputs=False), replace(measured, separate_memory=False))
    ]
    found = zip(*accounts, peaks, strict=True)
    dry_run_bytes = tuple(_with(need, peak + need.optimizer + need.total - own.total) for need, own, peak in found)
    return replace(
        candidate, dry_run_bytes=dry_run_bytes, note="bytes: counted in one step of the engine on fake tensors"
    )


def measure_peaks(model: Planned, x: Any, y: Any, loss: StepLoss, candidate: Candidate, few: int) -> list[int]:
    """Return the peak bytes of each device in a step of ``few`` micro-batches, without the state of an optimizer.

    All stages share memory, as on a CPU, so the output of a stage stays as long as the next stage needs it. The peak
    thus depends on the order of the stages; the result is the largest of three steps, in two of which the first or the
    last stages run as early as possible. On devices with their own memory and one stage each, a step in which the first
    stages are ahead is enough. Any error means that a layer needs the values of tensors.
    """
    sizes, chunks = candidate.sizes, candidate.chunks
    mode = fake_mode()
    inputs, targets = _first(model, x, chunks, few, mode), None if y is None else _first(model, y, chunks, few, mode)
    few = len(scatter(inputs, few))
    placement = candidate.costs.measured.placement
    pipe = build_trial_pipe(model, model.faked(mode), ["cpu"] * len(sizes), few, candidate)
    program, arguments = candidate.program(few), loss.without_data(whole=candidate.costs.measured.whole_loss)
    with closing(pipe), inline(), FusedAttention() if candidate.costs.measured.separate_memory else nullcontext():
        # The first step of a pipe detects the properties of its layers, for which one micro-batch is enough.
        pipe.chunks = 1
        pipe.step(first(inputs, few, 1), None if targets is None else first(targets, few, 1), **arguments)
        pipe.chunks = few
        ahead = in_turns(program, placement, [4.0**j for j in range(len(sizes))])
        # First, the last stage that can run does. In the last step, the last devices are ahead.
        behind = in_turns(program, placement, [4.0**-place for place in placement])
        is_enough = candidate.costs.measured.separate_memory and len({*placement}) == len(placement)
        steps = [ahead] if is_enough else [program, ahead, behind]
        found = [peak_bytes(pipe, inputs, targets, arguments, step, placement) for step in steps]
    return [max(peaks) for peaks in zip(*found, strict=True)]


def returns_sums(model: Planned, x: Any, y: Any, loss: StepLoss) -> bool:
    """Return whether the loss function returns a :class:`gpipe.LossSum` in an evaluation on fake tensors.

    Return False if the evaluation fails.
    """
    mode, seen = fake_mode(), list[LossValue]()
    inputs, targets = _first(model, x, 1, 1, mode), None if y is None else _first(model, y, 1, 1, mode)
    try:
        with closing(model.pipe(model.faked(mode), [len(model.layers)], devices=["cpu"])) as pipe, inline():
            pipe.evaluate(inputs, targets, loss_fn=loss.watch(seen.append))
            return seen[0].count is not None
    except Exception:  # a layer needs the values of tensors
        return False


def build_trial_pipe(
    model: Planned, copied: nn.Module, devices: Sequence[torch.device | str], chunks: int, candidate: Candidate
) -> GPipe:
    """Return a pipe of a copy in training mode. It logs no advice, since the user has not chosen its settings."""
    pipe = model.pipe(
        copied,
        candidate.sizes,
        devices=devices,
        chunks=chunks,
        checkpoint=candidate.modes,
        offload=candidate.costs.measured.host.parameters,
    )
    without_advice(pipe)
    # Evaluation mode has no dropout and no recomputation. Norms that are frozen in a training model stay frozen.
    return pipe if pipe.training else pipe.train()


def _first(model: Planned, value: Any, chunks: int, few: int, mode: Any) -> Any:
    return first(model.blank(value, mode), chunks, few)


def first(value: Any, chunks: int, few: int) -> Any:
    """Return the first ``few`` micro-batches of ``value``, joined."""
    bare, spec = unwrap(value)
    leaves, tree = flatten(gather(scatter(bare, chunks, spec)[:few], spec))
    return unflatten([_apply_rule(*each) for each in zip(leaves, rules(bare, spec), strict=True)], tree)


def _apply_rule(leaf: Any, rule: Any) -> Any:
    if leaf is None or not isinstance(rule, Split):
        return leaf if leaf is None else Replicate(leaf)
    # Leaves with counts raised when they were measured. A plain target stays plain, as torch's losses expect.
    return Split(leaf, rule.dim) if rule.dim else leaf


def in_turns(program: Schedule, placement: Sequence[int], seconds: Sequence[float]) -> Schedule:
    """Return the steps for one thread, ordered by their start if the actions of each stage take ``seconds``."""
    spans = replay(program.on(placement), [dict.fromkeys(Kind, each) for each in seconds])
    return Schedule(program, (tuple(sorted(spans, key=lambda step: spans[step].start)),))


def _with(need: DeviceBytes, found: int) -> DeviceBytes:
    """Return ``need`` with the total ``found``. The remainder counts as transient."""
    left = max(0, found - need.parameters - need.optimizer)
    gradients = min(need.gradients, left)
    activations = min(need.activations, left - gradients)
    return replace(need, gradients=gradients, activations=activations, transient=left - gradients - activations)
