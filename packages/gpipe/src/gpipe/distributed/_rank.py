""":class:`Rank`: one process's part of a pipe that spans several processes."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from microbatch import Versions, map_tensors

from .._chooser import choice_of
from .._torch import READ_BY_DATA_PARALLEL, SET_BY_FSDP
from ..engine._left_behind import refuse_in_runs
from ..engine._loss_value import LossValue, own_loss
from ..engine._losses import Losses
from ..engine._mini_batch import compute_outputs, train
from ..engine._offloaded import Offload
from ..engine._pipeline import Pipeline
from ..engine._settings import settings
from ..engine._workers import Workers
from ..module._arguments import Device, checked_flag, checked_offload, whole
from ..module._cut import checked
from ..module._devices import expect_same_device
from ..module._frequencies import expect_sums
from ..module._init import initializer_of, take_off_hooks
from ..module._keywords import Call, called_with, given_to
from ..module._modes import Modes, checked_modes, expect_fitting, laid_out
from ..module._partition import BalanceError, checked_balance, expect_sequential, partitions_of, recommend_auto_balance
from ..module._rule import Rule, SeenSums, is_left_open, named_for
from ..module._step import Asked, Prepared, Stepping
from ..module._torch_losses import is_of_torch
from ..module._training import Unlike
from ..module._transforms import refuse_transforms
from ..schedule import SCHEDULES, SPLITTING, Choice, Schedule
from ..schedule._named import expect_schedule
from ..skip import verify_skippables
from ..transport._copy import CopyStreams
from ..values._leaves import as_value
from ._agreement import METHOD, agreement, checksums, described
from ._deferred_signals import allow_signals, defer_signals
from ._digests import Digests
from ._errors import LostRankError
from ._far_loss import FarLoss
from ._groups import Group, Groups, end_collectives, open_groups
from ._norm import clip, norm_over
from ._own import Share, own_share
from ._parallel import expect_parallel, sharded_over, synced_layers, synced_over
from ._processes import Opening, Ranks
from ._rendezvous import Rendezvous
from ._replicas import Replicas
from ._sharded import Sharding
from ._wrapped import Wrapped, expect_plain, expect_unwrapped, managed_by_fsdp


class Rank(Stepping):
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
        groups = open_groups(group, _seconds(timeout), _announce_new)
        self._group = group
        self._replicas = Replicas(replicas, groups.timeout, _announce_new_replica)
        rendezvous = Rendezvous(groups)
        with agreement(self._replicas.meeting) as shared:
            with agreement(rendezvous) as found, allow_signals():
                expect_plain(module)
                self.chunks = chunks
                self._deferred = checked_flag("deferred_batch_norm", deferred_batch_norm)
                self.__dict__.update(_least_rows=2 if self._deferred else 1, _offload=checked_offload(offload))
                initializer, ranks = initializer_of(init), None if ranks is None else [*ranks]
                kept = take_off_hooks(module)
                stages = len(groups.members if ranks is None else ranks)
                every = self._divide(module, balance, blocks, stages, sample)
                self._checkpoint = expect_fitting(checked_modes(checkpoint), len(self._balance))
                self._ranks = _checked_ranks(ranks, len(self._balance), len(groups.members))
                found.alike = self._made_alike(module, transport)
            with agreement(rendezvous) as placed, allow_signals():
                norm_chunks = self._chunks if self._deferred else 0
                self._share_by_all(every)
                share = own_share(
                    every, self._ranks, groups.me, device, initializer or kept, norm_chunks, offload=bool(self._offload)
                )
                placed.told = share.told(transport)
            self.training = module.training
            self._guards: list[RemovableHandle] = []
            self._keep(module, share)
            self._end_guards = weakref.finalize(self, _remove, self._guards)
            self._devices = share.devices
            self._connect(share, groups, placed.heard)
            shared.alike = found.alike | (checksums(self) if self._replicas.are_there else {})
            self._sharding = Sharding(share.partitions, share.tied)
            self._synced, self._members = synced_layers(self), groups.members
        self._last: Choice | None = None
        self._averages = True
        self.__dict__["_sums"] = SeenSums()
        self._parallel: set[dist.ProcessGroup] = set()
        _created[next(_numbers)] = self

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
        self._balance = checked_balance(balance, len(module))
        return [*partitions_of(module, self._balance)]

    def _share_by_all(self, every: Sequence[nn.Module]) -> None:
        """Add the modules that all ranks have to the first partition of each rank."""

    def _keep(self, module: nn.Module, share: Share) -> None:
        """Register the layers of this rank."""
        assert isinstance(module, nn.Sequential)
        self._take(share.partitions, module)
        self._laid_out = self._held()
        self._guards = _guarded(share)

    def _connect(self, share: Share, groups: Groups, told: Sequence[Mapping[str, Any]]) -> None:
        """Create the engine's stages, and connect them to the stages of other ranks."""
        devices = share.device_of
        cpu = torch.device("cpu")
        every, layout = laid_out(share.every, [devices.get(j, cpu) for j in range(len(self._ranks))])
        stages = [every[j] for j in share.numbers]
        routes = [(source, target) for _, source, target in layout.routes]
        processes = self._joined(share, routes, groups, told)
        streams, workers = self._copy_streams(share), Workers(share.devices)
        self._pipeline = Pipeline(stages, layout, streams, workers, processes, offload=self._offload)

    def _joined(
        self, share: Share, routes: Sequence[tuple[int, int]], groups: Groups, told: Sequence[Mapping[str, Any]]
    ) -> Ranks:
        """Connect to the other ranks, with channels between neighbors and for these ``routes``."""
        self._trained = sorted(j for each in told for j in each["trained"])
        self._processes = Ranks(share, routes, groups, self._ranks, self._replicas, told)
        return self._processes

    def _copy_streams(self, share: Share) -> list[CopyStreams]:
        streams = {device: CopyStreams.on(device) for device in share.devices}  # shared: torch has few, see MOST
        return [streams[each] for each in share.devices]

    def _made_alike(self, module: nn.Module, transport: str) -> dict[str, Any]:
        """Return the values that must be equal on all ranks at construction, keyed by names for error messages."""
        return {
            "balance": self._balance,
            "ranks": self._ranks,
            **described(module),
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
                found.batches, _ = self._cut(checked(as_value(args, kwargs), self.in_spec))
            if args or kwargs:
                found.rows = Digests({"input": as_value(args, kwargs)})
        with torch.no_grad():
            size = self._size(len(found.batches), trains=False)
            with self._pipeline.section.entered():
                spec = self._pipeline.spec(size, seed=found.seed)
                outputs = compute_outputs(self._pipeline, spec, found.batches, Versions())
        return self._gathered(outputs, found.batches) if self._pipeline.ends else None

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
        with self._pipeline.section.entered():
            self._processes.close()
            self._end_guards()

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

    def _prepared(self, call: Call, schedule: Schedule | str | None, scope: ExitStack) -> Prepared:
        """Prepare a step or an evaluation.

        Ranks without the first stage have only row counts as micro-batches. Ranks without the last stage have a
        :class:`FarLoss`.
        """
        scope.enter_context(defer_signals())  # until the end of the call
        with self._replicas.hearing(self._end_collectives) if call.trains else nullcontext():
            with self._opening(call.method, schedule) as found, allow_signals():
                self._expect_fit(call)
                asked = self._asked(call, schedule, found)
                found.rows = Digests({"input": call.input, **call.arguments, "target": call.target})
            asked = asked._replace(batches=asked.batches or found.batches)
            if call.trains:
                self._last = self._choice(schedule, whole=found.whole)
            losses: Losses = self._far_loss(asked, whole=found.whole)
            if self._pipeline.ends:
                try:
                    losses = self._losses(asked, scope, whole=found.whole)
                except Exception as error:
                    self._processes.call_off([error])
        return Prepared(asked.batches, self._size(len(asked.batches), trains=call.trains), losses, found.seed)

    def _asked(self, call: Call, schedule: Schedule | str | None, found: Opening) -> Asked:
        """Check a call. On the rank of the first stage, split its inputs into the micro-batches of ``found``."""
        if not self._pipeline.begins:
            return Asked(call, schedule, given_to(call), [])
        asked = self._cut_for_loss(Asked(call, schedule, called_with(self._end(0), call), []))
        found.batches = asked.batches
        found.whole = self._is_whole(asked, self._size(len(found.batches), trains=call.trains))
        return asked

    def _far_loss(self, asked: Asked, *, whole: bool) -> FarLoss:
        return FarLoss(is_whole=whole)

    def _rule(self, asked: Asked) -> Rule | None:
        found, call = super()._rule(asked), asked.call
        if found is None and call.target is None and not self._pipeline.ends and is_of_torch(call.loss_fn):
            return Rule(own_loss, None)  # only the rank of the last stage has the target
        return found

    def _unlike(self, asked: Asked) -> Unlike:
        error, loss_fn = super()._unlike(asked), asked.call.loss_fn
        is_decided = loss_fn is None or loss_fn in self._sums or not is_left_open(asked.schedule)

        def unlike(value: LossValue) -> ValueError:
            return error(value) if is_decided or value.count is not None else ValueError(_DECIDED)

        return unlike

    def _end_collectives(self) -> None:
        """Close the connections that layers use for collectives, so that no process waits in one for this process.

        If there are any, no further step can start.
        """
        shared = [group for group in self._parallel if group.size() > 1]
        for group in shared:
            end_collectives(group)
        if shared:
            self._processes.leave()

    def _updates_by(self, optimizer: Any) -> NoReturn:
        raise ValueError(
            "optimizer= is for a GPipe in one process; gradients that ranks and replicas share are complete only at "
            "the end of a step: call optimizer.step() after step()"
        )

    def _train(self, prepared: Prepared, schedule: Schedule | str | None) -> None:
        assert self._last is not None
        own = schedule if isinstance(schedule, Schedule) else self._last
        batches, size, losses, seed, _ = prepared
        with self._replicas.hearing(self._end_collectives), self._sharding.reduced_once(losses):
            train(self._pipeline, self._pipeline.spec(size, own, losses, seed=seed), batches)
        if self._averages:
            self._replicas.average(self)
        else:
            self._replicas.skip_average()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in steps without averaging them over the replicas.

        The first step outside this context averages all accumulated gradients, as with
        ``DistributedDataParallel.no_sync``. All replicas use it in the same steps. Parameters that ``fully_shard`` has
        sharded are not affected; see ``set_requires_gradient_sync``.

        >>> with rank.no_sync():  # doctest: +SKIP
        ...     rank.step(x1, y1, loss_fn=loss_fn)
        >>> rank.step(x2, y2, loss_fn=loss_fn)  # doctest: +SKIP
        """
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before

    def _readers(self) -> set[int]:
        """Return the ranks that need the tensors of mini-batches, as indices in the group."""
        return {self._ranks[0], self._ranks[-1]}

    @contextmanager
    def _opening(self, method: str, schedule: Schedule | str | None = None) -> Iterator[Opening]:
        """Check the arguments of a call on each rank. The block creates the micro-batches on the first stage's rank.

        After the block, all ranks have the micro-batches' row counts.
        """
        with self._processes.opening() as found:
            self._expect_layers()
            found.alike = self._called_alike(method, schedule)
            parallel = synced_over(self._synced) | sharded_over(self)
            self._parallel = set().union(*parallel.values())
            if method == "step":
                self._replicas.meeting.expect_open()
            if schedule is not None:
                _expect_schedule(schedule)
            self._sharding.expect_whole()
            expect_parallel(parallel, self._members)
            yield found

    def _choice(self, schedule: Schedule | str | None, *, whole: bool) -> Choice:
        """Return the schedule to run for ``schedule``. Nothing is measured, so ``"auto"`` means the default."""
        if isinstance(schedule, Schedule):
            return choice_of(schedule)
        name = named_for(schedule, whole=whole, offloads=bool(self._offload)).lower()
        # The first trained stage sends no input gradient, so there is nothing to compute before its weight gradients.
        return Choice("1f1b" if name == "auto" else name, tuple(self._trained[1:]) if name in SPLITTING else ())

    def _called_alike(self, method: str, schedule: Schedule | str | None) -> dict[str, Any]:
        """Return the values that must be equal on all ranks in a call, keyed by names for error messages."""
        return {
            METHOD: method,
            "schedule": None if schedule is None else str(schedule),
            "training": self.training,
            "chunks": self._chunks,
            "recording": settings().observer is not None,
        }


def _expect_schedule(schedule: object) -> None:
    if isinstance(schedule, str) and schedule.lower() == "search":
        raise ValueError(
            'schedule="search" is for a pipe in one process, because nothing is measured across processes; pass a '
            "Schedule that gpipe.simulate.search finds, the same on all ranks"
        )
    expect_schedule(schedule, (*SCHEDULES, "auto"))


setattr(Rank, READ_BY_DATA_PARALLEL, property(Wrapped))
setattr(Rank, SET_BY_FSDP, managed_by_fsdp)

_DECIDED = (
    "the rank of the first stage decides whether the loss is computed once. It got a different loss_fn, target or "
    "reduction= than the rank of the last stage, or none, and the rank of the last stage cannot determine how the "
    "losses of micro-batches add up; pass the same on both ranks"
)


def _guarded(share: Share) -> list[RemovableHandle]:
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


@defer_signals()
def announce(rank: Rank, method: str, check: Callable[[Sequence[int]], None] = lambda members: None) -> None:
    """Begin a ``method`` that all ranks and replicas call together. ValueError on all if one calls another one.

    Args:
        check: called with the global ranks of the pipe. If it raises an error on one rank, all ranks raise.
    """
    if not rank._processes.is_open:  # a checkpoint may still be saved, without these connections
        check(rank._members)
        return
    with rank._processes.opening() as found, allow_signals():
        found.alike = {METHOD: method}
        check(rank._members)
    rank._processes.closing({})
    rank._replicas.announce(method)


def _announce_new(members: Sequence[int]) -> None:
    """Announce to the last rank of the same ``members`` that this one creates a new one. ValueError if it is in a call.

    A member that is only late creates its new rank later, and then announces it, too.
    """
    for rank in _latest(lambda rank: rank._members == tuple(members)):
        with suppress(LostRankError):  # it was closed on another member, whose last rank is an earlier one
            with rank._processes.opening() as found:
                found.alike = {METHOD: "Rank"}
            rank._processes.closing({})
            return


def _announce_new_replica(members: Sequence[int]) -> None:
    """Announce a new rank to the replicas of the last one; see :func:`_announce_new`."""
    for rank in _latest(lambda rank: rank._replicas.meeting.groups.members == tuple(members)):
        with suppress(LostRankError):
            rank._replicas.announce("Rank")
            return


def _latest(fits: Callable[[Rank], bool]) -> list[Rank]:
    """Return the ranks of this process that are connected and ``fit``, the last one first."""
    return [rank for _, rank in sorted(_created.items(), reverse=True) if rank._processes.is_open and fits(rank)]


_numbers = itertools.count()
_created: WeakValueDictionary[int, Rank] = WeakValueDictionary()


@defer_signals()
def shared_by_first(rank: Rank, method: str, read: Callable[[], Any]) -> Any:
    """Call ``read`` on the rank of the first stage, and return its result on all ranks, which call this together.

    Ranks that need the tensors of mini-batches get copies on the CPU. Other ranks get None in place of each tensor.
    """
    processes, readers = rank._processes, rank._readers()
    first, me = processes.ranks[0], processes.me
    value: Any = None
    with processes.opening() as found, allow_signals():
        found.alike = {METHOD: method}
        if me == first:
            value = read()
    empty = processes.closing({"value": map_tensors(lambda tensor: None, value)} if me == first else {})[first]["value"]
    if me == first:
        # A pickled view would contain all of its storage, such as the full dataset.
        processes.spread(map_tensors(lambda tensor: tensor.detach().clone().cpu(), value), readers)
        return value
    return processes.spread(None, readers) if me in readers else empty


@defer_signals()
def gradient_norm(rank: Rank, method: str) -> Tensor:
    """Return the 2-norm of the gradients of all ranks, which call this in the same ``method``."""
    with rank._processes.opening() as found, allow_signals():
        found.alike = {METHOD: method}
    others = rank._processes.tied.of_others()
    own = [p.grad for p in rank.parameters() if p.grad is not None and p not in others]
    return norm_over(rank._group, rank._processes.closing, own, rank._devices[0])


def _remove(guards: Sequence[RemovableHandle]) -> None:
    for guard in guards:
        guard.remove()


def _checked_ranks(ranks: Iterable[int] | None, stages: int, members: int) -> list[int]:
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
