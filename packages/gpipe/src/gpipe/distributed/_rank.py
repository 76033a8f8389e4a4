""":class:`Rank`: one process's part of a pipe that spans several processes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from microbatch import Versions

from .._torch import READ_BY_DATA_PARALLEL, SET_BY_FSDP
from ..engine._leaked_graphs import refuse_in_runs
from ..engine._mini_batch import compute_outputs
from ..engine._offloaded import Offload
from ..engine._pipeline import Pipeline
from ..engine._workers import Workers
from ..module._arguments import Device, check_flag, check_offload, whole
from ..module._devices import expect_same_device
from ..module._frequencies import expect_sums
from ..module._init import get_initializer, take_off_hooks
from ..module._modes import Modes, check_modes, expect_fitting, laid_out
from ..module._partition import BalanceError, check_balance, expect_sequential, recommend_auto_balance, split_layers
from ..module._rule import SeenSums
from ..module._split_batch import check_batch
from ..module._transforms import refuse_transforms
from ..schedule import Choice
from ..skip import verify_skippables
from ..transport._copy import CopyStreams
from ..values._leaves import Activation, as_value
from ._agreement import agreement, checksums, describe_model
from ._calls import announce_new, announce_new_replica, gradient_norm, register
from ._deferred_signals import allow_signals, defer_signals
from ._digests import Digests
from ._groups import Group, Groups, open_groups
from ._local_stages import LocalStages, local_stages
from ._norm import clip
from ._object_exchange import ObjectExchange
from ._parallel import find_synced_layers
from ._processes import RankProcesses
from ._replicas import Replicas
from ._sharded import Sharding
from ._steps import RankStepping
from ._wrapped import Wrapped, expect_plain, expect_unwrapped, managed_by_fsdp


class Rank(RankStepping):
    """One process's part of a pipe: the layers of its stages, under the model's names.

    Every process of a group creates a ``Rank`` of the same model with the same arguments, and calls the same methods in
    the same order. The gradients, and the loss on all ranks, match :class:`gpipe.GPipe` in one process.

    Args:
        module: the full model, as for :class:`gpipe.GPipe`. Only this rank's layers are kept, and moved to its device.
            If the model is on ``meta``, ``init`` allocates and fills only these layers. A model with a custom forward
            keeps its other layers on ``meta``, and its forward runs on each rank.
        balance: the number of layers, or blocks, of each stage. It is optional for a model with a custom forward, whose
            blocks are balanced by the bytes of their parameters over ``ranks``, or over all processes.
        blocks, sample, deferred_batch_norm, in_spec, out_spec, init, offload: see :class:`gpipe.GPipe`.
        chunks: the number of micro-batches per mini-batch.
        checkpoint: which micro-batches are recomputed, or send what they save to the host: a mode of
            :class:`gpipe.GPipe`, or a list with one mode per stage.
        ranks: the process of each stage, as its index in the group. By default process ``j % n`` of n has stage j, as
            for ``"interleaved"``. ``[0, 1, 1, 0]`` is the placement for a V-shaped schedule.
        group: the processes that take part, as a process group or a one-dimensional mesh such as ``mesh["pp"]``; by
            default all processes. A private gloo group of the same processes carries the messages.
        replicas: the group, or mesh, of the processes with the same stages, one per replica of the pipe. They
            synchronize at the end of each :meth:`step`: if it fails in one, it raises in all, and their gradients are
            averaged, unless it is in :meth:`no_sync`. They must start with the same weights and buffers.
        device: the device of this rank's stages, or a list with one device per stage; by default the CPU.
        timeout: how long to wait for another rank before it counts as lost, in seconds or as a ``timedelta``; by
            default the timeout of ``group``. It must exceed the time any rank needs for a step and for the work between
            two steps.
        transport: how tensors on accelerators are sent to other ranks. ``"auto"``: from device to device if PyTorch has
            a backend for both, such as NCCL, else through host memory. ``"host"``: always through host memory, for
            example because two ranks share a device.

    Attributes:
        stages: the indices of this rank's stages, a list of int.
        balance: the number of layers of each stage of the model, a list of int.
        ranks: the process of each stage, as its index in the group, a list of int.
        partitions: an ``nn.ModuleList`` with the layers of each of this rank's stages.

    Raises:
        RuntimeError: there is no process group, or this process is not in it.
        ValueError, TypeError: as for :class:`gpipe.GPipe`; ``ranks`` does not fit; or arguments differ between ranks.
            Raised on every rank.
        LostRankError: another process has exited, or does not create its rank within ``timeout``.

    >>> # torchrun --nproc-per-node 2 train.py
    >>> dist.init_process_group("gloo")  # doctest: +SKIP
    >>> rank = Rank(model, balance=[2, 1], chunks=4)  # doctest: +SKIP
    >>> loss = rank.step(x, y, loss_fn=loss_fn)  # doctest: +SKIP
    """

    _ANEW = "; make a new Rank of a model that has the layers"

    @defer_signals()
    def __init__(
        self,
        module: nn.Module,
        balance: Iterable[int] | None = None,
        *,
        blocks: str | Sequence[str] | None = None,
        sample: Any = None,
        chunks: int = 1,
        checkpoint: str | Sequence[str] = "except_last",
        deferred_batch_norm: bool = False,
        ranks: Iterable[int] | None = None,
        group: Group | None = None,
        replicas: Group | None = None,
        device: Device | Sequence[Device] = "cpu",
        in_spec: Any = None,
        out_spec: Any = None,
        init: Any = None,
        timeout: float | timedelta | None = None,
        transport: str = "auto",
        offload: Offload = False,
    ) -> None:
        super().__init__()
        self.in_spec, self.out_spec = in_spec, out_spec
        groups = open_groups(group, _seconds(timeout), announce_new)
        self._group = group
        self._replicas = Replicas(replicas, groups.timeout, announce_new_replica)
        exchange = ObjectExchange(groups)
        with agreement(self._replicas.meeting) as shared:
            with agreement(exchange) as found, allow_signals():
                expect_plain(module)
                self.chunks = chunks
                self._deferred = check_flag("deferred_batch_norm", deferred_batch_norm)
                self.__dict__.update(_least_rows=2 if self._deferred else 1, _offload=check_offload(offload))
                initializer, ranks = get_initializer(init), None if ranks is None else [*ranks]
                kept = take_off_hooks(module)
                stages = len(groups.members if ranks is None else ranks)
                every = self._divide(module, balance, blocks, stages, sample)
                self._checkpoint = expect_fitting(check_modes(checkpoint), len(self._balance))
                self._ranks = _check_ranks(ranks, len(self._balance), len(groups.members))
                found.must_match = self._creation_to_match(module, transport)
            with agreement(exchange) as placed, allow_signals():
                norm_chunks = self._chunks if self._deferred else 0
                self._share_by_all(every)
                share = local_stages(
                    every, self._ranks, groups.me, device, initializer or kept, norm_chunks, offload=bool(self._offload)
                )
                placed.sent = share.report(transport)
            self.training = module.training
            self._guards: list[RemovableHandle] = []
            self._keep(module, share)
            self._end_guards = weakref.finalize(self, _remove, self._guards)
            self._devices = share.devices
            self._connect(share, groups, placed.received)
            shared.must_match = found.must_match | (checksums(self) if self._replicas.are_there else {})
            self._sharding = Sharding(share.partitions, share.tied)
            self._synced, self._members = find_synced_layers(self), groups.members
        self._last: Choice | None = None
        self._averages = True
        self.__dict__["_sums"] = SeenSums()
        self._parallel: set[dist.ProcessGroup] = set()
        register(self)

    def _divide(
        self,
        module: nn.Module,
        balance: Iterable[int] | None,
        blocks: str | Sequence[str] | None,
        stages: int,
        sample: Any,
    ) -> list[nn.Module]:
        """Set the balance, and return the partition of each stage. Without ``balance``, there are ``stages`` stages."""
        expect_sequential(module)
        assert isinstance(module, nn.Sequential)
        if blocks is not None or sample is not None:
            raise TypeError("blocks= and sample= are for a model with a custom forward; omit them")
        if balance is None:
            raise BalanceError(recommend_auto_balance("balance is required: how many layers each stage gets"))
        verify_skippables(module)
        expect_sums(module, self._chunks)
        self._balance = check_balance(balance, len(module))
        return [*split_layers(module, self._balance)]

    def _share_by_all(self, every: Sequence[nn.Module]) -> None:
        """Add the modules that all ranks have to the first partition of each rank."""

    def _keep(self, module: nn.Module, share: LocalStages) -> None:
        """Register the layers of this rank."""
        assert isinstance(module, nn.Sequential)
        self._take(share.partitions, module)
        self._laid_out = self._list_layers()
        self._guards = _guard_parameters(share)

    def _connect(self, share: LocalStages, groups: Groups, reports: Sequence[Mapping[str, Any]]) -> None:
        """Create the engine's stages, and connect them to the stages of other ranks."""
        devices = share.device_of
        cpu = torch.device("cpu")
        every, layout = laid_out(share.every, [devices.get(j, cpu) for j in range(len(self._ranks))])
        stages = [every[j] for j in share.numbers]
        routes = [(source, target) for _, source, target in layout.routes]
        processes = self._join(share, routes, groups, reports)
        streams, workers = self._copy_streams(share), Workers(share.devices)
        self._pipeline = Pipeline(stages, layout, streams, workers, processes, offload=self._offload)

    def _join(
        self,
        share: LocalStages,
        routes: Sequence[tuple[int, int]],
        groups: Groups,
        reports: Sequence[Mapping[str, Any]],
    ) -> RankProcesses:
        """Connect to the other ranks, with channels between neighbors and for these ``routes``."""
        self._trained = sorted(j for each in reports for j in each["trained"])
        self._processes = RankProcesses(share, routes, groups, self._ranks, self._replicas, reports)
        return self._processes

    def _copy_streams(self, share: LocalStages) -> list[CopyStreams]:
        streams = {device: CopyStreams.on(device) for device in share.devices}  # shared: torch has few, see MOST
        return [streams[each] for each in share.devices]

    def _creation_to_match(self, module: nn.Module, transport: str) -> dict[str, Any]:
        """Return the values that must be equal on all ranks at construction, keyed by names for error messages."""
        return {
            "balance": self._balance,
            "ranks": self._ranks,
            **describe_model(module),
            "deferred_batch_norm": self._deferred,
            "checkpoint": self._checkpoint,
            "offload": self._offload,
            "transport": transport,
        }

    @property
    def stages(self) -> list[int]:
        """The indices of this rank's stages."""
        return [stage.index for stage in self._pipeline.stages]

    @property
    def ranks(self) -> list[int]:
        """The process of each stage, as its index in the group."""
        return list(self._ranks)

    @property
    def checkpoint(self) -> Modes:
        """The checkpoint mode, or a list with one mode per stage."""
        return copy.copy(self._checkpoint)

    @checkpoint.setter
    def checkpoint(self, mode: object) -> None:
        raise AttributeError(f"checkpoint of a Rank cannot be set to {mode!r}{self._ANEW}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rank:
        """Apply ``fn`` to all tensors, when the rank or a module around it is moved or cast; only a cast is allowed."""
        expect_same_device(fn, (*self.parameters(), *self.buffers()))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._pin()
        return self

    @property
    def last_schedule(self) -> Choice | None:
        """The schedule of the last :meth:`step`, the same on all ranks; see :attr:`gpipe.GPipe.last_schedule`."""
        return self._last

    @defer_signals()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output in the pipeline, without gradients.

        Args:
            args, kwargs: the inputs of the model, on the rank of the first stage. Other ranks may omit them, but for a
                model with a custom forward all ranks need the same inputs.

        Returns:
            The output of the model on the rank of the last stage, and None on the other ranks.

        Raises:
            TypeError, ValueError: the input is missing on a rank that needs it, or cannot be split into micro-batches.
        """
        refuse_transforms()
        with self._opening("forward") as found, allow_signals():
            if self._pipeline.begins:
                found.batches, _ = self._cut(check_batch(as_value(args, kwargs), self.in_spec))
            if args or kwargs:
                found.rows = Digests({"input": as_value(args, kwargs)})
        with torch.no_grad():
            size = self._size(len(found.batches), trains=False)

            def run() -> Sequence[Activation]:
                spec = self._pipeline.spec(size, seed=found.seed)
                return compute_outputs(self._pipeline, spec, found.batches, Versions())

            outputs = self._pipeline.run_lock.run(run)
        return self._gather(outputs, found.batches) if self._pipeline.ends else None

    @defer_signals()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of all stages by their total norm, as ``torch.nn.utils.clip_grad_norm_`` does.

        All ranks call this together. A weight shared by stages on several
        ranks counts once. For sharded gradients, all shards count. The host does not wait for accelerators.

        Args:
            max_norm: the largest norm. Gradients with a smaller norm are not changed.

        Returns:
            The 2-norm of all gradients before clipping, equal on all ranks.

        Raises:
            LostRankError: another rank has exited or does not respond.
            RuntimeError: this rank was closed.
            ValueError: ranks call different methods. Raised on every rank.
        """
        norm = gradient_norm(self, "clip_grad_norm_")
        clip(self.parameters(), max_norm, norm)
        return norm

    def close(self) -> None:
        """Close the connections to other ranks, which otherwise close when this object is freed.

        Ranks call this independently of each other, after the last step. Parameters and state dict remain usable. Later
        calls of this :class:`Rank` raise RuntimeError. Other ranks that still wait for it raise
        :class:`gpipe.distributed.LostRankError`.
        """

        def close() -> None:
            self._processes.close()
            self._end_guards()

        self._pipeline.run_lock.run(close)

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse ``fully_shard``, which derives a class from that of the module it is applied to."""
        expect_unwrapped(cls)
        super().__init_subclass__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a Rank has connections to other processes, so it cannot be copied or pickled; copy rank.parameters(), as "
            "for an average of weights, or save rank.state_dict()"
        )

    def extra_repr(self) -> str:
        return f"stages={self.stages} of {len(self._balance)}, chunks={self._chunks}, checkpoint={self._checkpoint!r}"


setattr(Rank, READ_BY_DATA_PARALLEL, property(Wrapped))
setattr(Rank, SET_BY_FSDP, managed_by_fsdp)


def _guard_parameters(share: LocalStages) -> list[RemovableHandle]:
    """Guard the parameters of other ranks against use here: they are not trained, and their gradients would be lost."""
    own = {id(parameter) for parameter in share.partitions.parameters()}
    return [
        refuse_in_runs(
            parameter,
            f"{name!r} belongs to stage {j} on another rank, but a layer or loss_fn of this rank uses it: its values "
            "here are the initial ones, and its gradient would be lost; return the needed values from its stage, or "
            "put both into one stage",
        )
        for j, partition in enumerate(share.every)
        if j not in share.numbers
        for name, parameter in partition.named_parameters()
        if parameter.requires_grad and id(parameter) not in own
    ]


def _remove(guards: Sequence[RemovableHandle]) -> None:
    for guard in guards:
        guard.remove()


def _check_ranks(ranks: Iterable[int] | None, stages: int, members: int) -> list[int]:
    """Return ``ranks`` as a list with the rank of each stage; ValueError unless every member has a stage."""
    if ranks is None:
        if stages < members:
            raise ValueError(
                f"balance: {stages} stages are too few for the {members} processes of the group; use at least one "
                "stage per process, or a smaller group"
            )
        return [j % members for j in range(stages)]
    found = [whole(rank) for rank in ranks]
    if len(found) != stages or {*found} != {*range(members)}:
        raise ValueError(
            f"ranks: expected the index of a process for each of the {stages} stages, with each of the {members} "
            f"processes of the group at least once; got {found}"
        )
    return found


def _seconds(timeout: float | timedelta | None) -> timedelta | None:
    if timeout is None or isinstance(timeout, timedelta):
        return timeout
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, or a timedelta; got {timeout!r}")
    return timedelta(seconds=timeout)
