"""What a pipe does with a mini-batch and a loss: a step of training, or an evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from microbatch import Batch, Split, Versions, rules

from .._flatten._own_loss import OwnLoss, with_whole_count
from .._flatten._segment import Segment
from .._hooks import refuse_hooks
from ..engine._loss_value import LossFunction
from ..engine._losses import Losses, LossStage
from ..engine._settings import with_settings
from ..schedule import Schedule
from ..values._leaves import Activation
from ..values._sharing import gathered
from ._arguments import checked_chunks
from ._cut import Checked, checked, cut, expect_proportional
from ._divided import Divided
from ._keywords import NOTHING, Call, called_with
from ._training import Kind, expect_grad_mode, losses_of, returned, tell_of_settings
from ._transforms import not_compiled, refuse_transforms


class Stepping(Divided):
    """The part of a pipe that computes losses."""

    in_spec: Any
    out_spec: Any
    _devices: list[torch.device]
    _chunks: int
    _told = False  # of settings that are seldom meant

    @property
    def chunks(self) -> int:
        """The number of micro-batches that a mini-batch is cut into; may be set."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self.__dict__["_chunks"] = checked_chunks(chunks)

    @not_compiled
    def step(
        self,
        input: Any = NOTHING,  # noqa: A002
        /,
        target: Any = None,
        *,
        loss_fn: LossFunction | None = None,
        schedule: Schedule | str = "1f1b",
        reduction: str = "mean",
        normalizer: float | Tensor | None = None,
        return_outputs: bool = False,
        **arguments: Any,
    ) -> Any:
        """Compute forward, loss and backward in one call.

        Adds to ``.grad`` what ``loss_fn(model(input), target).backward()`` would. A micro-batch may begin its backward
        as soon as its forward is done, so fewer are held at a time: with ``"1f1b"``, n − j on stage j of n.

        Args:
            input: the only argument of :meth:`forward`, which may be a mapping, or :class:`Arguments` for several.
            target: tensors, or a tree of them, cut like ``input`` and moved to the last device. ``Split(y, dim=1)`` and
                ``Replicate(y)`` around a part set how it is cut.
            loss_fn: called with the output and the target of each micro-batch; without a target, with the output alone,
                or with None if it requires a second argument. Returns a scalar, or ``(sum, count)``; either may be
                followed by a dict of metrics. If nothing counts, the loss is nan and the gradients are zeros, as of
                torch's means. By default the output is the loss, or has it as ``.loss``; for a flattened model, that of
                all rows.
            schedule: one of :data:`gpipe.schedule.SCHEDULES`, ``"auto"``, or a :class:`gpipe.schedule.Schedule`.
                ``"auto"`` measures the first steps and takes the fastest of ``"1f1b"``, ``"zero_bubble"`` and
                ``"fill_drain"``. ``"interleaved"``, ``"looped_bfs"`` and ``"interleaved_zero_bubble"`` need devices as
                in ``[0, 1, 0, 1]``, ``"zbv"`` and ``"dualpipev"`` as in ``[0, 1, 1, 0]``.
            reduction: how the losses of micro-batches are combined: ``"sum"`` adds them up; ``"mean"`` weights each by
                its rows, or, if ``loss_fn`` returns a mean of ``torch.nn.functional``, such as a cross entropy, by the
                labels that count in it.
            normalizer: what the ``"sum"`` is divided by.
            return_outputs: also return the outputs, as :meth:`forward` would, detached.
            arguments: keywords for the first layer, as in ``step(**batch)``.

        Returns:
            The loss of the mini-batch, detached; ``(loss, metrics)`` if ``loss_fn`` returns metrics. Scalar metrics are
            averaged, weighted by rows; other tensors, with a row for each sample, are concatenated. With
            ``return_outputs`` the outputs come last.

        A mean over anything else than rows or labels, such as one that is divided by the sum of a mask, is refused
        unless it is in proportion to the rows. Let ``loss_fn`` return the sum and the count; the gradients are those of
        the sum divided by the count::

            def loss_fn(logits, batch):
                losses = F.cross_entropy(logits.mT, batch["tokens"], reduction="none")
                return (losses * batch["mask"]).sum(), batch["mask"].sum()

        Raises:
            TypeError: a keyword that the first layer does not take, or that is also an argument of this method; a
                target without a ``loss_fn`` that takes it; a loss, count or metric that is not a number or tensor.
            ValueError: an unknown schedule, or one that does not fit; a loss that is not a scalar or does not require
                grad, or is not determined by those of micro-batches; a target or metrics with another number of rows
                than the input.
            RuntimeError: grad mode is off; the pipe itself has hooks; it is in a ``DistributedDataParallel``, outside
                of ``no_sync()``.
            Exception: any error of a layer, with a note that names the place.

        >>> import torch
        >>> from gpipe import GPipe
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pipe = GPipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
        >>> pipe.step(torch.zeros(8, 4), torch.zeros(8, 2), loss_fn=nn.functional.mse_loss).requires_grad
        False
        """
        if not self._told:
            self._told = True
            is_trained = self.training or self._last_segment() is None  # who has layers in a row has chosen a mode
            is_patched = "forward" in vars(self)
            tell_of_settings(training=is_trained, chunks=self._chunks, stages=len(self._balance), is_patched=is_patched)
        call = Call("step", input, target, arguments, loss_fn, reduction, normalizer, return_outputs)
        with self._combining(call):
            batches, losses = self._with_losses(LossStage, call, schedule)
            self._train(batches, losses, schedule)
            return self._returned(losses, batches, call)

    @not_compiled
    def evaluate(
        self,
        input: Any = NOTHING,  # noqa: A002
        /,
        target: Any = None,
        *,
        loss_fn: LossFunction | None = None,
        reduction: str = "mean",
        normalizer: float | Tensor | None = None,
        return_outputs: bool = False,
        **arguments: Any,
    ) -> Any:
        """Forward and loss, without gradients: what :meth:`step` would return with the layers as they are.

        Call ``eval()`` before, and ``train()`` after, as for a plain model.

        Args:
            input, target, loss_fn, reduction, normalizer, return_outputs, arguments: as for :meth:`step`. A loss need
                not require grad.

        Returns:
            As :meth:`step`.

        Raises:
            TypeError, ValueError: as :meth:`step`, but of the schedule.
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
        with self._combining(call):
            batches, losses = self._with_losses(Losses, call)
            self._pipeline.evaluate(batches, losses)
            return self._returned(losses, batches, call)

    def _returned(self, losses: Losses, batches: Sequence[Batch], call: Call) -> Any:
        return returned(losses, batches, self.out_spec, call.return_outputs, has_outputs=self._pipeline.ends)

    def _ending(self) -> Segment | None:
        """The last layer, if it makes the whole output of a model that computes its own loss."""
        last = self._last_segment()
        return None if last is None or last.ending is None or self.out_spec is not None else last

    def _last_segment(self) -> Segment | None:
        last = self._end(-1) if self._balance else None
        return last if isinstance(last, Segment) else None

    def _gathered(self, outputs: Sequence[Activation], batches: Sequence[Batch]) -> Any:
        try:
            return gathered(outputs, batches, self.out_spec)
        except ValueError:
            last = self._last_segment()
            # Outputs are losses that the model computes itself: no out_spec combines them.
            if last is not None and last.own_loss is not None and last.ending is None and self.out_spec is None:
                raise last.own_loss.of_parts() from None
            raise

    def _own_loss(self, call: Call) -> OwnLoss | None:
        """How losses that a flattened model computes itself are combined."""
        last = self._last_segment()
        return last.own_loss if last is not None and call.loss_fn is None else None

    def _combining(self, call: Call) -> AbstractContextManager[None]:
        own = self._own_loss(call)
        return nullcontext() if own is None else with_settings(wanted=own)

    def _cut(self, inputs: Checked) -> tuple[list[Batch], Versions]:
        self._follow_model(inputs.bare)
        batches, versions = cut(inputs, self._pipeline.stages[0].device, self._chunks)
        expect_proportional(batches)
        return batches, versions

    def _with_losses(
        self, kind: type[Kind], call: Call, schedule: Schedule | str | None = None
    ) -> tuple[list[Batch], Kind]:
        self._expect_fit(kind, call)
        inputs = called_with(self._end(0), call)
        # The versions of inputs matter to a later backward only, and a step has its backward inside.
        own = self._own_loss(call)
        batches, _ = self._cut(self._checked(inputs, own))
        return batches, losses_of(kind, call, batches, self._chunks, self._pipeline.stages[-1].device, own)

    def _checked(self, inputs: Any, own: OwnLoss | None) -> Checked:
        """The mini-batch of a step. A flattened model's number of items is not cut; ``own`` combines its losses."""
        flattened = isinstance(self._end(0), Segment)
        by_name = self.in_spec is None or isinstance(self.in_spec, Mapping)
        found = checked(with_whole_count(inputs) if flattened and by_name else inputs, self.in_spec)
        if own is not None and any(isinstance(rule, Split) and rule.counts is not None for rule in rules(*found)):
            own.expect_counts()
        return found

    def _expect_fit(self, kind: type[Losses], call: Call) -> None:
        if kind is LossStage:
            expect_grad_mode()
        refuse_transforms()
        if not self._devices:
            raise ValueError(f"{call.method}() needs at least one layer; this pipe is empty")
        refuse_hooks(self, call.method)
        kind = vars(type(self)).get("_plain_class", type(self))
        owner = next(each for each in kind.__mro__ if "forward" in vars(each))
        if not owner.__module__.startswith("gpipe."):
            raise RuntimeError(
                f"{call.method}() does not call the forward of {owner.__qualname__}, as each micro-batch has a loss of "
                "its own; let a layer or loss_fn do what it does, or use pipe(input) and backward()"
            )

    @abstractmethod
    def _train(self, batches: list[Batch], loss: LossStage, schedule: Schedule | str) -> None:
        """Put the micro-batches through all stages and back."""
