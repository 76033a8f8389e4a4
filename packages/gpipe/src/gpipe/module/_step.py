"""``step`` and ``evaluate``: train or evaluate on one mini-batch with a loss."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from microbatch import Batch, Versions

from .._hooks import refuse_hooks
from ..engine._loss_value import LossFunction, own_loss
from ..engine._losses import Losses
from ..engine._mini_batch import evaluate
from ..engine._updates import Updates
from ..engine._worker_steps import Size, waits
from ..schedule import SCHEDULES, Schedule
from ..schedule._named import expect_schedule
from ..values._leaves import Activation
from ..values._sharing import gather_outputs
from ._arguments import check_chunks
from ._frequencies import expect_sums
from ._keywords import NOTHING, Call, bind_arguments
from ._partitioned import PartitionedModule
from ._rule import OF_ALL_ROWS, OF_MODEL, Rule, SeenSums, find_rule, has_loss, is_left_open, of_model_under, unlike
from ._split_batch import Checked, check_batch, expect_proportional, split_batch
from ._tied import pin_parameters
from ._training import (
    Unlike,
    build_losses,
    build_result,
    build_whole_loss,
    expect_grad_mode,
    warn_about_settings,
    warn_of_mixing,
    warn_of_one,
)
from ._transforms import not_compiled, refuse_transforms

_log = logging.getLogger("gpipe")
Made = TypeVar("Made", bound="Stepping")


class Asked(NamedTuple):
    """A call of ``step`` or ``evaluate`` with its micro-batches.

    Attributes:
        inputs: the arguments of the first layer, for the full mini-batch.
        batches: the micro-batches; a process without the first stage has only their numbers of rows.
        kind: the kind of loss that a model computes; None unless its losses of micro-batches can add up.
        adds: True if losses of this kind are known to add up.
    """

    call: Call
    schedule: Schedule | str | None
    inputs: Any
    batches: list[Any]
    kind: Any = None
    adds: bool = False


class Prepared(NamedTuple):
    """The data of a run: micro-batches, and the object that computes their losses.

    Attributes:
        seed: the seed of random numbers, if processes have agreed on one.
        updates: updates parameters during the run.
    """

    batches: list[Batch]
    size: Size
    losses: Losses
    seed: int | None = None
    updates: Updates | None = None


def without_advice(pipe: Stepping) -> None:
    """Disable the warnings about the settings of ``pipe``, because it is only used for a trial."""
    pipe._has_warned = pipe._has_warned_of_whole = pipe._has_warned_of_batch = True


class Stepping(PartitionedModule):
    """Add ``step`` and ``evaluate`` to a pipe."""

    in_spec: Any
    out_spec: Any
    _devices: list[torch.device]
    _chunks: int
    _least_rows = 1
    """The number of rows that a micro-batch needs: two with deferred batch norm, which fails on a single row."""
    _offload: bool | torch.dtype = False
    """Whether parameters are on the host; the dtype in which stages compute with them, if it is another."""
    _has_warned = False  # about settings
    _has_warned_of_whole = False
    _sums: SeenSums
    _of_models: type[Stepping]

    def __new__(cls: type[Made], module: Any = None, *args: Any, **kwargs: Any) -> Made:
        """Create a pipe. The subclass registered for ``cls`` is used for a model that is not an ``nn.Sequential``."""
        has_own = isinstance(module, nn.Module) and not isinstance(module, nn.Sequential)
        made: type[Made] = vars(cls).get("_of_models", cls) if has_own else cls
        return super().__new__(made)

    def __init_subclass__(cls, *, of_models: bool = False) -> None:
        """If ``of_models``, register ``cls`` as the class that its last base creates for models."""
        super().__init_subclass__()
        if of_models:
            cls.__bases__[-1]._of_models = cls  # type: ignore[attr-defined]

    @property
    def chunks(self) -> int:
        """The number of micro-batches that a mini-batch is split into; can be set."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        number = check_chunks(chunks)
        if "_partitions" in self.__dict__:
            expect_sums(self._partitions, number)
        self.__dict__["_chunks"] = number

    @not_compiled
    def step(
        self,
        input: Any = NOTHING,  # noqa: A002
        /,
        target: Any = None,
        *,
        loss_fn: LossFunction | None = None,
        schedule: Schedule | str | None = None,
        reduction: str | None = None,
        normalizer: float | Tensor | None = None,
        return_outputs: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        **arguments: Any,
    ) -> Any:
        """Compute forward, loss and backward in one call.

        Accumulates the gradients of ``loss_fn(model(input), target)`` into ``.grad``, for any loss function. If it is
        known how the losses of micro-batches add up, each backward starts as soon as its forward has finished, so fewer
        micro-batches are in flight: with ``"1f1b"``, n − j on stage j of n. It is known if

        - ``loss_fn`` returns a :class:`gpipe.LossSum`, and is annotated so or has returned one before;
        - ``reduction`` declares that ``loss_fn`` returns a mean over rows, or a sum;
        - ``loss_fn`` is one of torch's losses, such as ``F.cross_entropy`` or ``nn.MSELoss()``;
        - the model computes the loss, and divides it by an argument called ``num_items_in_batch``.

        Any other loss is computed once, on the outputs of the full mini-batch, between all forwards and all backwards.

        Args:
            input: the only argument of :meth:`forward`, which may be a mapping, or :class:`Arguments` for several.
            target: the second argument of ``loss_fn``; moved to the last device. If losses are computed per
                micro-batch, a tensor or a tree of tensors that is split like ``input``; wrap parts in
                ``Split(y, dim=1)`` or ``Replicate(y)`` to change how. If the loss is computed once, any object.
            loss_fn: called with output and target; without a target, with the output alone, or with None if it requires
                a second argument. Returns a scalar or a :class:`gpipe.LossSum`; either may be followed by a dict of
                metrics, as in ``(loss, metrics)``. If the total count is 0, the loss is NaN and the gradients are
                zeros, as for torch's means. By default the output is the loss, or contains it as ``.loss`` or
                ``["loss"]``.
            schedule: one of :data:`gpipe.schedule.SCHEDULES`, ``"auto"``, ``"search"``, or a
                :class:`gpipe.schedule.Schedule`. By default ``"1f1b"`` if it is known how losses add up, else
                ``"fill_drain"``. ``"auto"`` measures the first steps and selects the fastest of ``"1f1b"``,
                ``"zero_bubble"`` and ``"fill_drain"``; ``"search"`` makes a schedule for the measured times.
                ``"interleaved"``, ``"looped_bfs"`` and ``"interleaved_zero_bubble"`` need devices as in
                ``[0, 1, 0, 1]``, ``"zbv"`` and ``"dualpipev"`` as in ``[0, 1, 1, 0]``.
            reduction: ``"mean"`` if ``loss_fn`` returns a mean over rows, ``"sum"`` if it returns a sum.
            normalizer: the divisor of the ``"sum"``, a nonzero number.
            return_outputs: whether to return the outputs as well, detached, as :meth:`forward` would.
            optimizer: for a pipe with ``offload=True``, updates the parameters of each stage on the host as soon as
                their gradients have arrived, while other stages compute. Its ``step()`` is called once per stage, when
                other parameters have no gradient; it must not depend on several parameters at once. Afterwards, its
                parameters have no gradient.
            arguments: keywords for the first layer, as in ``step(**batch)``.

        Returns:
            The loss of the mini-batch, detached; ``(loss, metrics)`` if ``loss_fn`` returns metrics. Over
            micro-batches, scalar metrics are averaged, weighted by rows, and other tensors, with one row per sample,
            are concatenated. With ``return_outputs``, the outputs are the last entry.

        A mean over the elements that a mask selects, as one sum and count per micro-batch::

            def loss_fn(logits, batch) -> LossSum:
                losses = F.cross_entropy(logits.mT, batch["tokens"], reduction="none")
                return LossSum((losses * batch["mask"]).sum(), batch["mask"].sum())

        Raises:
            TypeError: the first layer does not accept a keyword, or has a parameter named like one of this method; a
                target without a ``loss_fn`` that accepts it; a loss, count or metric that is not a number or tensor.
            ValueError: a schedule that is unknown, does not fit the pipe, or cannot wait for a loss on the full
                mini-batch; a loss that is not a scalar or does not require grad; a target or metrics of micro-batches
                whose number of rows differs from the input's.
            RuntimeError: grad mode is off; the pipe itself has hooks; it is in a ``DistributedDataParallel``, outside
                ``no_sync()``.
            Exception: any error of a layer, with a note that gives its partition and micro-batch.

        >>> import torch
        >>> from gpipe import GPipe
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = GPipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
        >>> pipe.step(torch.zeros(8, 4), torch.zeros(8, 2), loss_fn=nn.functional.mse_loss).requires_grad
        False
        """
        if not self._has_warned:
            self._has_warned = True
            # Only pretrained models start in evaluation mode; for an nn.Sequential, the caller has chosen it.
            is_trained = self.training or self._model is None or isinstance(self._model, nn.Sequential)
            warn_about_settings(training=is_trained, is_patched="forward" in vars(self))
        updates = None if optimizer is None else self._updates_by(optimizer)
        call = Call("step", input, target, arguments, loss_fn, reduction, normalizer, return_outputs)

        def run() -> Any:
            with ExitStack() as scope:
                prepared = self._prepare_call(call, schedule, scope)
                self._warn_of_batch(len(prepared.batches))
                self._train(prepared._replace(updates=updates), schedule)
                return self._build_result(prepared, call)

        return self._pipeline.run_lock.run(run)

    @not_compiled
    def evaluate(
        self,
        input: Any = NOTHING,  # noqa: A002
        /,
        target: Any = None,
        *,
        loss_fn: LossFunction | None = None,
        reduction: str | None = None,
        normalizer: float | Tensor | None = None,
        return_outputs: bool = False,
        **arguments: Any,
    ) -> Any:
        """Compute the forward and the loss without gradients, with the layers in their current mode.

        Call ``eval()`` before, and ``train()`` afterwards, as for a plain model.

        Args:
            input, target, loss_fn, reduction, normalizer, return_outputs, arguments: the same as for :meth:`step`. The
                loss need not require grad.

        Returns:
            The same as :meth:`step`.

        Raises:
            TypeError, ValueError: the same as for :meth:`step`, except for the schedule.
            RuntimeError: the pipe itself has hooks.

        >>> import torch
        >>> from gpipe import GPipe
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = GPipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=4).eval()
        >>> x, y = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
        >>> loss_fn = nn.functional.cross_entropy
        >>> torch.equal(pipe.evaluate(x, y, loss_fn=loss_fn), pipe.step(x, y, loss_fn=loss_fn))
        True
        """
        call = Call("evaluate", input, target, arguments, loss_fn, reduction, normalizer, return_outputs)

        def run() -> Any:
            with ExitStack() as scope:
                prepared = self._prepare_call(call, None, scope)
                with torch.no_grad():
                    spec = self._pipeline.spec(prepared.size, loss=prepared.losses, seed=prepared.seed)
                    evaluate(self._pipeline, spec, prepared.batches)
                return self._build_result(prepared, call)

        return self._pipeline.run_lock.run(run)

    def _pin(self) -> None:
        """Pin the memory of parameters on the host again, after a cast."""
        if self._offload:
            pin_parameters(self._partitions, self._devices)

    def _updates_by(self, optimizer: Any) -> Updates:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
        if not self._offload:
            raise ValueError(
                "optimizer= is for a pipe with offload=True, whose parameters are updated on the host while stages "
                "compute; for any other pipe call optimizer.step() after step()"
            )
        return Updates(optimizer)

    def _build_result(self, prepared: Prepared, call: Call) -> Any:
        losses, batches = prepared.losses, prepared.batches
        # With metrics, only an annotation selects losses per micro-batch: metrics would change after the first step.
        if losses.is_sum and losses.metrics is None and call.loss_fn is not None:
            self._sums.add(call.loss_fn)
        return build_result(losses, batches, self.out_spec, call.return_outputs, has_outputs=self._pipeline.ends)

    def _gather(self, outputs: Sequence[Activation], batches: Sequence[Batch]) -> Any:
        return gather_outputs(outputs, batches, self.out_spec)

    def _cut(self, inputs: Checked, part: nn.Module | None = None) -> tuple[list[Batch], Versions]:
        self._follow_model(inputs.bare, part)
        batches, versions = split_batch(inputs, self._pipeline.stages[0].device, self._chunks, self._least_rows)
        expect_proportional(batches)
        return batches, versions

    def _prepare_call(self, call: Call, schedule: Schedule | str | None, scope: ExitStack) -> Prepared:
        """Check and split the arguments of a call, and enter contexts in ``scope`` that last until its end."""
        self._expect_fit(call)
        asked = self._cut_for_loss(Asked(call, schedule, bind_arguments(self._end(0), call), []))
        size = self._size(len(asked.batches), trains=call.trains)
        losses = self._losses(asked, scope, whole=self._is_whole(asked, size))
        return Prepared(asked.batches, size, losses)

    @property
    def _cuts_by_name(self) -> bool:
        return self.in_spec is None or isinstance(self.in_spec, Mapping)

    def _adds_up(self, asked: Asked) -> bool:
        """Return whether the losses that a model computes for micro-batches are known to add up."""
        return asked.adds

    def _cut_for_loss(self, asked: Asked) -> Asked:
        """Return ``asked`` with its micro-batches."""
        # Versions detect changes of the input before a later backward, and step() runs its backward itself.
        return asked._replace(batches=self._cut(check_batch(asked.inputs, self.in_spec))[0])

    def _rule(self, asked: Asked) -> Rule | None:
        """Return how losses of micro-batches add up; None if unknown."""
        call = asked.call
        sums = call.loss_fn is not None and call.loss_fn in self._sums
        return find_rule(call, asked.batches, self.out_spec, returns_sums=sums, adds=self._adds_up(asked))

    def _unlike(self, asked: Asked) -> Unlike:
        return unlike(asked.call, asked.schedule)

    def _is_whole(self, asked: Asked, size: Size) -> bool:
        """Return whether the loss is computed once, on the outputs of all micro-batches."""
        call, schedule, batches = asked.call, asked.schedule, asked.batches
        if has_loss(schedule):
            return True
        if self._rule(asked) is not None:
            return False
        if is_left_open(schedule):
            is_free = True
        else:
            expect_schedule(schedule, SCHEDULES)
            is_free = waits(schedule, size)
        model = self._computes_loss(asked)
        if not is_free and model is not None:
            raise of_model_under(model, schedule)
        if model is None and call.loss_fn is None and len(batches) > 1:
            return False  # the output is already the loss of a micro-batch
        return is_free

    def _computes_loss(self, asked: Asked) -> str | None:
        """Return the name of the model that computes the loss for ``asked``; None if a ``loss_fn`` or layer does."""
        return None

    def _losses(self, asked: Asked, scope: ExitStack, *, whole: bool) -> Losses:
        """Return the object that computes losses in the process of the last stage."""
        call, batches = asked.call, asked.batches
        device = self._pipeline.stages[-1].device
        if not whole:
            rule = self._rule(asked) or Rule(call.loss_fn or own_loss, None)
            return build_losses(call, rule, batches, (self._chunks, self._least_rows), device, self._unlike(asked))
        self._warn_of_whole(asked)
        return build_whole_loss(call, batches, self.out_spec, device, self._unlike(asked))

    @property
    def _has_warned_of_batch(self) -> bool:
        # Not an attribute of the pipe: a layer may contain it, and its recomputation must not see a changed attribute.
        return self._pipeline.has_warned_of_batch

    @_has_warned_of_batch.setter
    def _has_warned_of_batch(self, has_warned: bool) -> None:
        self._pipeline.has_warned_of_batch = has_warned

    def _warn_of_batch(self, microbatches: int) -> None:
        """Warn, at the first mini-batch that trains, if nothing overlaps or if layers mix rows."""
        if not self._has_warned_of_batch and torch.is_grad_enabled():
            self._has_warned_of_batch = True
            if microbatches == 1 and len(self._balance) > 1:
                warn_of_one(chunks=self._chunks, stages=len(self._balance))
            elif microbatches > 1:
                warn_of_mixing(self)

    def _warn_of_whole(self, asked: Asked) -> None:
        """Warn once that the outputs of all micro-batches are kept, unless the caller has chosen the schedule."""
        overlaps = min(len(asked.batches), len(self._balance)) > 1
        if asked.call.trains and asked.schedule is None and overlaps and not self._has_warned_of_whole:
            self._has_warned_of_whole = True
            _log.warning(OF_ALL_ROWS if asked.call.loss_fn is not None else OF_MODEL)

    def _expect_fit(self, call: Call) -> None:
        if call.trains:
            expect_grad_mode()
        refuse_transforms()
        if not self._devices:
            raise ValueError(f"{call.method}() needs at least one layer; this pipe is empty")
        refuse_hooks(self, call.method)
        kind = vars(type(self)).get("_plain_class", type(self))
        owner = next(each for each in kind.__mro__ if "forward" in vars(each))
        if not owner.__module__.startswith("gpipe."):
            raise RuntimeError(
                f"{call.method}() runs the layers itself and does not call the forward of {owner.__qualname__}; move "
                "its code into a layer or loss_fn, or use pipe(input) and backward()"
            )

    @abstractmethod
    def _train(self, prepared: Prepared, schedule: Schedule | str | None) -> None:
        """Run the forwards and backwards of all micro-batches through all stages."""
