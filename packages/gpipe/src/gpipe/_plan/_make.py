"""From a model, a mini-batch and devices to a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from profiler import Profile
from streams import add_note

from .._flatten._shapes import expect_data
from ..module._arguments import Device, checked_devices, checked_flag
from ..module._sequential import as_sequential
from ._after import lowered, read_after
from ._arguments import (
    SCHEDULES,
    OptimizerChoice,
    expect_rows,
    expect_target,
    optimizer_bytes,
    read_chunks,
    read_loss,
    read_memory,
    read_modes,
    read_schedules,
)
from ._calibrate import UNSURE, calibrated
from ._candidate import Space
from ._costs import Measured
from ._data import Expected, Remembered, layer_keys
from ._fake import FAKE, Fake, read_fake
from ._fleet import Layout, all_chunks, dealt, layouts_of, of_several_rows, read_size, search_all, told
from ._infeasible import Infeasible, Relaxation, explain
from ._measure import count, measure, rows_of
from ._outcome import plan_of
from ._plan import Plan

GUESSED = Expected(0.5, 1.0, 2.0)
"""The same where nothing ran."""


def plan(
    model: nn.Module,
    sample: Any,
    devices: Iterable[Device] | str,
    *,
    target: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: OptimizerChoice = "adam",
    memory: int | str | Sequence[int | str | None] | None = None,
    chunks: int | Iterable[int] | None = None,
    checkpoint: str | Sequence[str] | None = None,
    schedule: str | Iterable[str] | None = None,
    profile: Profile | None = None,
    calibrate: bool = True,
    bandwidth: float | str | Sequence[float | str] | None = None,
    latency: float | Sequence[float] | None = None,
    after: BaseException | None = None,
) -> Plan:
    """How to train ``model`` on ``devices``: balance, chunks, schedule, and which stages or layers recompute, to fit.

    Layers are profiled one by one at a few sizes of micro-batches, and the engine with stages that do nothing. For each
    number of chunks and each schedule, the best balance and modes are found together (:func:`blockpartition.place`)
    and, if memory is short, the layers of a stage to recompute so that it just fits. The fastest candidates are
    simulated action by action. Among those within 5 % of the fastest, the one with the fewest chunks is preferred,
    then 1F1B, then the fastest; never one that is slower than if only whole stages could be recomputed. A copy of the
    model is trained with it for a few steps, and the measured times of its cells correct the costs. Then up to five
    candidates that are expected to be about as fast are trained in turns, and the plan is the simplest of those within
    2 % of the fastest.

    Args:
        model: an ``nn.Sequential``, or any model that :func:`gpipe.flatten` takes. It is not changed.
        sample: a mini-batch, with as many rows as in training.
        devices: one for each stage; or text such as ``"8x80GB"`` or ``"8xH100"`` for devices that are not there. Then
            nothing runs: the model may be on ``meta``, bytes are counted, and seconds are an estimate by the operations
            and bytes of each layer. ``"64x8x80GB"`` are 64 nodes of 8 devices: then the plan also chooses the number of
            replicas, with equal shares of the rows, and the number of stages of each replica.
        target: the target of the loss, for ``sample``.
        loss_fn: of :meth:`gpipe.GPipe.step`. Without it the loss counts as free.
        optimizer: the size of its state: a name such as ``"adam"`` or ``"sgd"``, bytes for each parameter, or a
            function of parameters such as ``torch.optim.AdamW``, which is tried on parameters without data.
        memory: the limit of each device, one for all or a list, in bytes or as text such as ``"24GiB"``. By default
            the memory of a GPU, and no limit on a CPU.
        chunks, checkpoint, schedule: to search less: a number or several; a mode or one for each stage, which are
            computed again as a whole then; a name or several.
        profile: of the layers on a micro-batch, instead of measuring; with ``rows=`` of at least two sizes, unless
            ``chunks`` is what it was made with. One without seconds, as of a model on ``meta``, gets estimated ones.
        calibrate: whether to train a copy for some steps: a few seconds, or some twenty steps if those take longer. It
            needs the memory that training takes. ``plan.predicted.seconds`` is then measured from steps; without, it
            is computed from the times of single layers.
        bandwidth: of devices that are not there, bytes a second that a device sends to another one: a number or text
            such as ``"50GB"`` or ``"400Gbit/s"``. Two are inside a node and between nodes; one is between nodes, or
            inside where there is one node. By default 25 and 12.5 GB/s.
        latency: of the same links, in seconds; by default 10 µs.
        after: the error of a step that ran out of memory. The device where that was counts as holding a tenth less than
            what was expected of the stage there, or of ``memory`` if that is less; ``plan.notes`` says so.

    Returns:
        The plan; ``print`` shows it, ``.build(model)`` makes the pipe.

    Raises:
        Infeasible: a ValueError; nothing fits. It says which device is short of how much, and what would fit.
        TypeError, ValueError: an argument is not what it may be, by its name.
        Exception: any error of a layer, with a note that names the layer.

    >>> model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    >>> found = plan(model, torch.zeros(8, 8), ["cpu", "cpu"], chunks=4, calibrate=False)
    >>> sum(found.balance), found.chunks, found.checkpoint
    (4, 4, ['never', 'never'])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Sequential, or a module that flatten takes, got {type(model).__name__}")
    expect_rows(sample)
    calibrate = checked_flag("calibrate", calibrate)
    loss_fn = read_loss(loss_fn, target)
    expect_target(target, sample)
    layers = as_sequential(model, sample)
    if not len(layers):
        raise ValueError("model: expected at least one layer, got none")
    fake, rows = read_fake(devices, bandwidth, latency), rows_of(sample)
    layouts, places = _layouts(devices, fake, len(layers), rows, chunks, checkpoint)
    names = [f"{FAKE}{fake.name}" if fake else str(place) for place in places]
    room = read_memory(read_size(fake, memory) if fake else memory, places)
    modes, schedules = {each.stages: read_modes(checkpoint, each.stages) for each in layouts}, read_schedules(schedule)
    given = {"target": target, "loss_fn": loss_fn, "optimizer": optimizer_bytes(optimizer, layers)}
    known = _expect_fit(profile, layers)
    if fake and after is not None:
        raise ValueError("after: devices that are not there run out of no memory; give the devices of the step")
    shortage = read_after(after, places, len(layers))
    if not fake and (known is None or calibrate):
        expect_data(layers, "plan")
    every = layouts[0].devices
    look = partial(count, layers, sample, fake, every) if fake else partial(measure, layers, sample, places)
    look = partial(look, known=known, **given)
    measured, layouts = _measured(look, layouts, may_leave_out=chunks is None and known is None)
    shares = [dealt(measured, fake, each) if fake else measured for each in layouts]
    spaces = [
        Space(share, each.chunks, schedules, modes[each.stages], room[: each.stages], pieces=checkpoint is None)
        for share, each in zip(shares, layouts, strict=True)
    ]
    learned: list[str] = []
    if shortage is not None:
        spaces[0], note = lowered(spaces[0], shortage, names[shortage.device])
        learned.append(note)
    space, found = search_all(spaces)
    if not found:
        raise _with_notes(explain(space, names, _relaxations(space, layers, optimizer)), learned)
    spread, notes = (
        (GUESSED, [_guessed(fake), *told(fake, found[0])]) if fake else (UNSURE, [_how(measured, layers), *learned])
    )
    if calibrate and not fake:
        space, found, spread, note = calibrated(space, found, layers, places, sample, target, loss_fn)
        notes = [*notes, note]
    here = Remembered(loss_fn=loss_fn, sample=sample)
    return plan_of(Plan, found, space, layer_keys(layers), names, spread, notes, here)


def _with_notes(error: Infeasible, notes: Sequence[str]) -> Infeasible:
    for note in notes:
        add_note(error, note)
    return error


def _layouts(
    devices: Iterable[Device] | str, fake: Fake | None, layers: int, rows: int, chunks: Any, checkpoint: Any
) -> tuple[list[Layout], list[torch.device]]:
    """The layouts to look at, and as many devices as the most stages take: ``meta`` for those that are not there."""
    if fake:
        layouts = layouts_of(fake, layers, rows, chunks, checkpoint)
        return layouts, [torch.device("meta")] * layouts[-1].stages
    places = checked_devices(devices, layers)
    if not places:
        raise ValueError("devices: expected at least one, got none")
    if any(place.type == "meta" for place in places):
        raise ValueError("devices: nothing runs on 'meta'; text such as '8x80GB' stands for devices that are not there")
    return [Layout(1, len(places), rows, tuple(read_chunks(chunks, rows)))], places


def _measured(
    look: Callable[[list[int]], Measured], layouts: list[Layout], may_leave_out: bool
) -> tuple[Measured, list[Layout]]:
    """The costs, and the layouts that they are for.

    Args:
        look: measures for some numbers of chunks.
        layouts: those that are wanted.
        may_leave_out: whether numbers of chunks with which a micro-batch is a single row may be left out.
    """
    try:
        return look(all_chunks(layouts)), layouts
    except ValueError:
        # Batch norm, for one, refuses a single row.
        rest = of_several_rows(layouts)
        if not may_leave_out or not rest or rest == layouts:
            raise
    return look(all_chunks(rest)), rest


def _guessed(fake: Fake) -> str:
    return (
        f"an estimate: nothing ran. Bytes are counted; seconds are those of {fake.flops / 1e12:.0f} TFLOP/s and "
        f"{fake.bandwidth / 1e12:.2f} TB/s, of which training reaches a part"
    )


def _how(measured: Measured, layers: nn.Sequential) -> str:
    first = measured.profiles[0]
    rows = ", ".join(str(each.rows) for each in (*first.others, first))
    return (
        f"{len(layers)} layers measured on {first.device} at {rows} rows; the engine adds "
        f"{measured.action * 1e6:.0f} µs to an action and {measured.step * 1e6:.0f} µs to a step"
    )


def _expect_fit(profile: Profile | None, layers: nn.Sequential) -> Profile | None:
    if not isinstance(profile, (Profile, type(None))):
        raise TypeError(f"profile: expected a profiler.Profile, got {type(profile).__name__}")
    if profile is not None and profile.names != [name for name, _ in layers.named_children()]:
        raise ValueError(f"profile: expected one of these {len(layers)} layers, got one of {', '.join(profile.names)}")
    return profile


def _relaxations(space: Space, layers: nn.Sequential, optimizer: OptimizerChoice) -> list[Relaxation]:
    """What the caller could ask for instead, the nearest first."""
    stages, rows = len(space.modes), space.measured.rows
    every = read_modes(None, stages)
    found: list[Relaxation] = []

    def offer(text: str, **changes: Any) -> None:
        found.append((text, partial(replace, space, **changes)))

    if list(space.modes) != every:
        offer("checkpoint=None, so that the plan may choose", modes=every, pieces=True)
    more = [m for m in read_chunks(None, rows) if m > space.chunks[-1]]
    if more:
        offer(f"chunks up to {more[-1]}", chunks=[*space.chunks, *more])
    if list(space.schedules) != list(SCHEDULES):
        offer("schedule=None, so that the plan may choose", schedules=SCHEDULES)
    if any(space.measured.optimizer) and optimizer != "sgd":
        plain = replace(space.measured, optimizer=(0,) * len(layers))
        offer("optimizer='sgd', which keeps no state", measured=plain)
    return found
