"""Measure the blocks of a model with steps of a pipe in which each block is a stage.

The cost of a block thus includes the code that the model runs after it. A step also shows whether the loss is computed
once, on the full mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import starmap
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

from microbatch import scatter, unwrap
from profiler import AllocationTracker, LayerProfile, Profile, profile
from profiler.fake import FusedAttention, fake_mode
from profiler.memory import owned_bytes
from profiler.sandbox import copied
from streams import add_note

from ..engine._loss_value import has_own_loss
from ..engine._settings import inline, with_settings
from ..engine._stage import Stage
from ..module._data import has_data
from ..module._step import without_advice
from ..schedule import Action, Kind, Schedule
from ..timeline import record
from ..values._leaves import get_tensors, storage_id
from ._arguments import count_rows
from ._dry_run import first
from ._loss import StepLoss
from ._planned import Planned, as_input, find_layers

ROUNDS = 3
"""The minimum number of timed steps per micro-batch size."""

Times = Mapping[tuple[int, str], float]
"""The seconds of actions by stage and kind."""


class Training(NamedTuple):
    """A model, a mini-batch and its loss."""

    model: Planned
    x: Any
    y: Any
    loss: StepLoss

    def faked(self, mode: Any) -> Training:
        """Return a copy with fake tensors in ``x`` and ``y``. The model is the same."""
        return self._replace(
            x=self.model.blank(self.x, mode), y=None if self.y is None else self.model.blank(self.y, mode)
        )


def with_own_loss(given: Training) -> StepLoss:
    """Return the loss, with the name of the model if the model computes it."""
    if given.loss.loss_fn is not None:
        return given.loss

    def computes(module: nn.Module, given: Training) -> bool:
        args, kwargs = unwrap(first(given.x, count_rows(given.x), 1))[0]
        with torch.no_grad():
            return has_own_loss(module(*args, **kwargs))

    return replace(given.loss, own=type(given.model.module).__name__) if _try_fake(given, computes) else given.loss


def is_whole(given: Training) -> bool:
    """Take two small steps, and return whether they compute the loss once, on the full mini-batch."""

    def shows(module: nn.Module, given: Training) -> bool:
        with closing(_Steps(given, module, ["cpu"] * len(given.model.layers))) as steps:
            return steps.begin(count_rows(given.x))

    # A loss that the model computes is tried with real values.
    if given.loss.own is not None and has_data(given.model.module):
        return _with_data(given, shows)
    return _try_fake(given, shows)


def _try_fake(given: Training, use: Callable[[nn.Module, Training], bool]) -> bool:
    """Return the result of ``use`` with fake tensors, or with real ones if that fails."""
    mode, model = fake_mode(), given.model
    try:
        return use(model.faked(mode), given.faked(mode))
    except Exception:
        if not has_data(model.module):
            raise
    return _with_data(given, use)


def _with_data(given: Training, use: Callable[[nn.Module, Training], bool]) -> bool:
    with torch.random.fork_rng():
        return use(copied(given.model.module).train(), given)


def profile_model(
    model: nn.Module, x: Any, device: torch.device, chunks: int, seconds: float, *, progress: bool = False
) -> Profile:
    """Return the costs of the layers of an ``nn.Sequential``, or of the blocks of another model, on one device.

    Args:
        model: the model.
        x: a mini-batch. One of ``chunks`` micro-batches is measured.
        device: the device of all layers.
        chunks: the number of micro-batches.
        seconds: the time to spend on measuring.
        progress: whether to show the progress, for an ``nn.Sequential`` only.
    """
    if isinstance(model, nn.Sequential):
        return profile(model, x, device=device, chunks=chunks, timeout=seconds, progress=progress)
    x = as_input(model, x)
    found = find_layers(model, x, lambda most: 1)
    given = Training(found, x, None, StepLoss())
    given = given._replace(loss=with_own_loss(given))
    return profile_blocks(given, [device] * len(found.layers), [-(-count_rows(x) // chunks)], seconds)[0]


def profile_blocks(
    given: Training, devices: Sequence[torch.device], sizes: Iterable[int], seconds: float, action: float = 0.0
) -> tuple[Profile, bool]:
    """Return the costs of the blocks, and whether a step computes the loss once, on the full mini-batch.

    Args:
        given: the model, the mini-batch and the loss.
        devices: one per block. On ``meta``, nothing is computed, and the profile has no seconds.
        sizes: the micro-batch sizes in rows. The closest possible sizes are measured.
        seconds: the time to spend on each size.
        action: the seconds that the engine adds per action, which are subtracted from the costs.
    """
    rows, model = count_rows(given.x), given.model
    chunks = sorted({-(-rows // size) for size in sizes})
    if devices[0].type != "meta":
        others = {device for device in devices if device.type != "cpu"}
        with torch.random.fork_rng(others), closing(_Steps(given, copied(model.module).train(), devices)) as steps:
            return steps.profile(chunks, seconds, action)
    try:
        mode = fake_mode()
        with closing(_Steps(given.faked(mode), model.faked(mode), devices)) as steps:
            found = steps.profile(chunks, seconds, action)
    except Exception as error:
        name = type(model.module).__name__
        add_note(
            error,
            f"{name} ran on fake tensors, since the devices are hypothetical; it must not read the values of tensors",
        )
        raise
    if not steps.is_unsized:
        return found
    # Some oneDNN kernels allocate memory whose size only real tensors show.
    zeros = nullcontext()
    with torch.random.fork_rng([]), closing(_Steps(given.faked(zeros), model.faked(zeros), devices)) as steps:
        return steps.profile(chunks, seconds, action)


class _Steps:
    """Steps of ``module``, a copy of the model, on a single micro-batch.

    Attributes:
        is_unsized: whether an allocation had a size that fake tensors do not show.
    """

    def __init__(self, given: Training, module: nn.Module, devices: Sequence[Any]) -> None:
        self._given = given
        self._device = torch.device(devices[0])
        self._is_fake = self._device.type == "meta"
        places = ["cpu"] * len(devices) if self._is_fake else devices
        self._pipe = given.model.pipe(module, [1] * len(devices), devices=places, checkpoint="never")
        without_advice(self._pipe)
        self._loss = given.loss.arguments()
        self._stages = range(len(devices))
        self.is_unsized = False

    def close(self) -> None:
        self._pipe.close()

    def begin(self, chunks: int) -> bool:
        """Take two steps on the first of ``chunks`` micro-batches. Return whether the loss is computed once."""
        x, y = self._given.x, self._given.y
        self._part = first(x, chunks, 1), None if y is None else first(y, chunks, 1)
        self._chunks, self._rows = chunks, scatter(x, chunks)[0].rows[0]
        self._step(None)  # detects which blocks are called, and the type of the loss
        self._is_whole = any(kind == Kind.LOSS for _, kind in self._time_step(None))
        return self._is_whole

    def profile(self, chunks: Iterable[int], seconds: float, action: float) -> tuple[Profile, bool]:
        found = dict[int, Profile]()
        for each in chunks:
            whole = self.begin(each)
            one = self._profile(seconds, action)
            found[one.rows] = one
        *fewer, most = (found[size] for size in sorted(found))
        return replace(most, others=tuple(fewer)), whole

    def _profile(self, seconds: float, action: float) -> Profile:
        rounds = [] if self._is_fake else self._rounds(seconds)
        times = {key: max(0.0, median(each[key] for each in rounds) - action) for key in (rounds[0] if rounds else ())}
        figures, of_loss = self._count()
        owned = owned_bytes(self._given.model.layers.values())
        blocks = [
            LayerProfile(
                name,
                type(block).__name__,
                times.get((k, Kind.FORWARD)),
                times.get((k, Kind.BACKWARD)),
                backward_input_seconds=times.get((k, Kind.BACKWARD_INPUT)),
                **owned[k],
                **figures[k],
            )
            for k, (name, block) in enumerate(self._given.model.named.items())
        ]
        took = times.get((self._stages[-1], Kind.LOSS))
        nothing = dict.fromkeys(owned[0], 0)
        loss = LayerProfile("loss", "loss", took, None if took is None else 0.0, **nothing, **of_loss)
        return Profile(
            layers=tuple(blocks),
            device=str(self._device),
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            chunks=self._chunks,
            rows=self._rows,
            rounds=len(rounds),
            loss=loss if self._is_whole else None,
        )

    def _rounds(self, seconds: float) -> list[Times]:
        """Time steps with full backwards, and with split ones."""
        found, began = list[Times](), perf_counter()
        plain, split = self._program("B0@{}"), self._program("I0@{} W0@{}")
        while len(found) < ROUNDS or perf_counter() - began < seconds:
            # A schedule that waits for the loss of the full mini-batch does not split backwards.
            found.append({**self._time_step(plain), **({} if self._is_whole else self._time_step(split))})
        return found

    def _program(self, backward: str) -> Schedule:
        forwards = [f"F0@{j}" for j in self._stages]
        loss = [f"C@{self._stages[-1]}"] if self._is_whole else []
        return Schedule.parse(" ".join([*forwards, *loss, *(backward.format(j, j) for j in reversed(self._stages))]))

    def _step(self, schedule: Schedule | None) -> None:
        (x, y), pipe = self._part, self._pipe
        pipe.zero_grad()
        with inline(), FusedAttention() if self._is_fake else nullcontext():
            pipe.step(x, y, **self._loss, schedule=schedule)

    def _time_step(self, schedule: Schedule | None) -> Times:
        with record() as timeline:
            self._step(schedule)
        return {(event.stage, event.kind): event.seconds for event in timeline.events}

    def _count(self) -> tuple[list[dict[str, int]], dict[str, int]]:
        """Return the bytes and operations of each block, and of the loss of the full mini-batch."""
        counter, sizes = _Counter(len(self._stages)), _Sizes()
        with with_settings(observer=counter), sizes.watching(list(self._pipe)):
            self._step(self._program("B0@{}"))
        self.is_unsized |= any(tracker.unsized for tracker in counter.trackers)
        # A stage sends the arguments of the next block.
        sent = [*(sizes.given.get(k, 0) for k in self._stages[1:]), sizes.returned.get(self._stages[-1], 0)]
        each = zip(counter.trackers, counter.saved, sent, strict=True)
        return list(starmap(_figures, each)), _figures(counter.loss, 0, 0)


class _Sizes:
    """The bytes of the arguments and outputs of blocks in their first calls."""

    def __init__(self) -> None:
        self.given = dict[int, int]()
        self.returned = dict[int, int]()

    @contextmanager
    def watching(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        with ExitStack() as scope:
            for k, block in enumerate(blocks):
                handle = block.register_forward_hook(partial(self._look, k), with_kwargs=True)
                scope.callback(handle.remove)
            yield

    def _look(self, k: int, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.given.setdefault(k, _count_bytes((args, kwargs)))
        self.returned.setdefault(k, _count_bytes(output))


def _figures(tracker: AllocationTracker, saved: int, output: int) -> dict[str, int]:
    # The gradient of the output comes from the next stage, and needs memory during this stage's backward.
    return {"saved_bytes": saved, "output_bytes": output, "peak_bytes": tracker.peak + output, "flops": tracker.flops}


class _Counter:
    """Count the allocations and operations of each stage in a step.

    Attributes:
        trackers: one per stage.
        loss: the tracker for the loss of the full mini-batch.
        saved: the bytes that each stage holds after the last forward.
    """

    def __init__(self, stages: int) -> None:
        self.trackers = [AllocationTracker() for _ in range(stages)]
        self.loss = AllocationTracker()
        self.saved = list[int]()

    def begin(self, placement: Sequence[int]) -> _Counter:
        return self

    @contextmanager
    def observing(self, stage: Stage, action: Action) -> Iterator[None]:
        if action.kind != Kind.FORWARD and not self.saved:
            self.saved = [tracker.alive() for tracker in self.trackers]
        tracker = self.loss if action.kind == Kind.LOSS else self.trackers[stage.index]
        with tracker.pushed():
            yield

    def got(self, payload: Any, *, moved: bool) -> None: ...

    def export_events(self, since: float) -> list[list[Any]]:
        return []

    def import_events(self, events: list[list[Any]], since: float) -> None: ...


def _count_bytes(value: Any) -> int:
    return sum({storage_id(tensor): tensor.nbytes for tensor in get_tensors(value)}.values())
