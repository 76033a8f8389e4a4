"""The stages of a pipe and their connections: built once, and read by every run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
from torch import nn

from streams import Context, waiting

from ..checkpoint import _attention, _parametrized
from ..checkpoint._random import RunRNG, interception
from ..schedule import Choice, Schedule
from ..schedule._offloads import cells_offloaded
from ..skip import SkipLayout
from ..transport._copy import CopyStreams
from ..transport._transport import Transport
from ._accumulate import DeferredGradients
from ._host_memory import expect_host_memory
from ._losses import Losses
from ._offloaded import Guests, HostLink, Offload
from ._processes import ALONE, Processes
from ._run_lock import RunLock
from ._saved import expect_no_hooks
from ._settings import Observer, settings
from ._spec import RunSpec, split_in, steps_of_run
from ._stage import Stage
from ._stage_run import StageRuns
from ._tied import Tied
from ._worker_steps import Size
from ._workers import Workers


class Pipeline:
    """The stages of a pipe, their workers, and the processes with the other stages.

    Args:
        copy_streams: per stage, the streams that copy tensors to and from its device.
        offload: whether the parameters of the stages are on the host, and in which dtype the stages compute.

    Attributes:
        devices: the devices of the stages in this process.
        count: the number of stages in all processes.
        begins, ends: whether the first and the last stage are in this process.
        offloaded: the stages whose parameters are on the host, in all processes.
        host_links: the streams that :meth:`host_link` has returned, by device.
        trainers: the threads that have run the pipe with gradients.
        has_warned_of_batch: whether the first mini-batch that trains was checked for warnings.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        layout: SkipLayout,
        copy_streams: Sequence[CopyStreams],
        workers: Workers,
        processes: Processes = ALONE,
        *,
        offload: Offload = False,
    ) -> None:
        self.stages = stages
        self.layout = layout
        self.copy_streams = copy_streams
        self.workers = workers
        self.processes = processes
        self.devices = [stage.device for stage in stages]
        self.on_accelerator = any(stage.on_accelerator for stage in stages)
        self.count = len(stages if processes.ranks is None else processes.ranks)
        self.begins = all(stage.index == 0 for stage in stages[:1])
        self.ends = all(stage.index == self.count - 1 for stage in stages[-1:])
        for stage in stages if offload else ():
            stage.guests = Guests(offload)
        self.offloaded = tuple(range(self.count)) if offload else ()
        self.host_links: dict[torch.device, HostLink] = {}
        self.trainers = WeakSet[waiting.Thread]()
        self.has_warned_of_batch = False
        self._room_for_gradients = 0
        interception.prepare()
        _attention.prepare()
        _parametrized.prepare()

    @property
    def run_lock(self) -> RunLock:
        """Held from the description of a run to its end, as all runs use the same parameters, workers and buffers."""
        return self.workers.run_lock

    @property
    def lines(self) -> tuple[int, ...]:
        """The worker or the process of each stage, as shown by a timeline."""
        return self.workers.placement if self.processes.ranks is None else self.processes.ranks

    def size(self, microbatches: int, checkpoint_stops: tuple[int, ...], offloading: tuple[int, ...] = ()) -> Size:
        """Return the size of a run that begins in this thread.

        Args:
            checkpoint_stops: per stage, the index below which micro-batches are recomputed before their backward.
            offloading: the stages whose cells send their saved tensors to the host.
        """
        alone = settings().inline and self.processes.ranks is None
        lines = (0,) * self.count if alone else self.lines
        return Size(microbatches, lines, checkpoint_stops, self.offloaded, offloading)

    def host_link(self, device: torch.device) -> HostLink:
        """Return the streams of ``device`` that copy from and to the host."""
        if device not in self.host_links:
            self.host_links[device] = HostLink.of(device)
        return self.host_links[device]

    def expect_room_for_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raise MemoryError if the host has no memory for the gradients of ``parameters`` that have none yet."""
        missing = {each: each.nbytes for each in parameters if each.requires_grad and each.grad is None}
        needed = sum(missing.values())
        if needed > self._room_for_gradients:
            expect_host_memory(needed, "gradients")
            self._room_for_gradients = needed

    @property
    def takes_inputs(self) -> bool:
        """True if this process needs the inputs of the model."""
        return self.begins

    def stage_runs(
        self, spec: RunSpec, rng: RunRNG, transport: Transport, tied: Tied, deferred: DeferredGradients
    ) -> StageRuns:
        """Return what makes the stages' parts of a run.

        Args:
            rng: the random numbers of the run.
            transport: the channels of the run.
            tied: the tensors that stages share.
            deferred: holds ``.grad`` and hooks of leaves of all stages.
        """
        return StageRuns()

    def spec(
        self,
        size: Size,
        schedule: Schedule | Choice | None = None,
        loss: Losses | None = None,
        *,
        seed: int | None = None,
        observer: Observer | None = None,
    ) -> RunSpec:
        """Describe a run that begins now in this thread, which holds :attr:`run_lock`.

        Args:
            schedule: the schedule of a training step.
            loss: computes the loss, if the run includes it.
            seed: the seed of random numbers, if processes have agreed on one.
            observer: observes the run, unless an observer of every run is set.

        Raises:
            ValueError: the schedule does not fit ``size``.
            RuntimeError: the thread has hooks for saved tensors, but stages have ``checkpoint="offload"``; or it is in
                the forward of another pipe's model, between its blocks.
        """
        if size.offloading:
            expect_no_hooks()
        trains = torch.is_grad_enabled()
        whole = loss is not None and loss.is_whole
        worker_steps, later = steps_of_run(size, schedule, has_loss=whole, goes_back=trains and loss is None)
        replays = loss is not None and bool(loss.replays)
        inline = self.processes.ranks is not None or settings().inline
        seen_by = settings().observer or observer
        splits = frozenset[int]() if schedule is None else split_in(worker_steps)
        with _parametrized.own_cache(_parametrized.is_caching()):
            context = Context.capture()
        _expect_shareable(context)
        spec = RunSpec(size, inline, worker_steps, later, trains, loss, context, seed, seen_by, splits, replays)
        return spec._replace(cells_offloaded=cells_offloaded(worker_steps)) if size.offloading else spec


def _expect_shareable(context: Context) -> None:
    """Expect that other threads may enter ``context``: it has no mode of a forward, which handles its operations."""
    if any(getattr(mode, "only_here", False) for mode in context.function_modes):
        raise RuntimeError(
            "between blocks of a pipe's model, another pipe can only be called as a module, pipe(x): its step() and "
            "evaluate(), and a Rank, are for code outside of models; call them before or after, or in a block"
        )
