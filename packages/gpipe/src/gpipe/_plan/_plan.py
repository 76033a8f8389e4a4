""":class:`gpipe.Plan`: the chosen configuration, the predictions for it, and the alternatives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from torch import nn

from profiler import documents

from .._gpipe import GPipe
from .._page import fragment, page, save
from ..module._arguments import Device, check_devices
from ..module._modes import check_modes
from ..module._partition import expect_sequential
from ..schedule import SCHEDULES, Schedule
from ..timeline import StageCost, Timeline, simulate
from ..timeline._svg import svg
from ._arguments import SEARCH, WAITING, count_rows
from ._candidate import build_schedule
from ._data import Alternative, LayerKey, Prediction, Remembered, layer_keys
from ._fake_devices import FAKE
from ._loss import StepLoss, fresh
from ._planned import as_input
from ._table import report
from ._verify import Verification, verify

_SCHEMA = "gpipe-plan/1"


def remembering(plan: Plan, loss: StepLoss, sample: Any) -> Plan:
    """Return ``plan``, with the loss and the sample attached. They are not saved."""
    plan._here.loss, plan._here.sample = loss, sample
    return plan


@dataclass(frozen=True)
class Plan:
    """A way to train a model on given devices, with predicted time and memory; see :func:`gpipe.plan`.

    ``str(plan)`` is a report. ``plan.build(model)`` builds the pipe.

    Attributes:
        chunks: the number of micro-batches.
        schedule: the name of the schedule for :meth:`gpipe.GPipe.step`.
        order: the schedule as text if it was searched, and ``schedule`` is ``"search"``; else empty.
        predicted: the predicted seconds, bytes per device by kind, throughput and bubble.
        alternatives: other configurations, and why each was not chosen.
        devices: the devices, as text.
        memory: the limit of each device in bytes; None for no limit.
        rows: the number of rows of the mini-batch.
        notes: how the figures were obtained, as text.
        layers: the name, class and number of parameters of each layer.
        placement: the index of the device of each stage.
        sizes, modes: the number of layers and the checkpoint mode of each stage.
        split: the indices of the stages whose backward is split.
        stages: the cost of each stage.
        hops: for each stage, the seconds of a transfer from the previous stage.
        whole_loss: whether the loss is computed once, on the outputs of the full mini-batch.
        own_forward: whether the model has its own forward, so that its layers are blocks.
        offload: whether parameters are on the host.
    """

    layers: tuple[LayerKey, ...]
    devices: tuple[str, ...]
    memory: tuple[int | None, ...]
    rows: int
    placement: tuple[int, ...]
    sizes: tuple[int, ...]
    chunks: int
    schedule: str
    modes: tuple[str, ...]
    split: tuple[int, ...]
    predicted: Prediction
    stages: tuple[StageCost, ...]
    hops: tuple[float, ...]
    whole_loss: bool
    own_forward: bool = False
    offload: bool = False
    order: str = ""
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    _here: Remembered = field(default_factory=Remembered, compare=False, repr=False)

    @property
    def balance(self) -> list[int]:
        """The number of layers of each stage."""
        return list(self.sizes)

    @property
    def checkpoint(self) -> list[str]:
        """The checkpoint mode of each stage."""
        return list(self.modes)

    @property
    def is_estimate(self) -> bool:
        """True if the devices are hypothetical, so that nothing was measured."""
        return self.devices[0].startswith(FAKE)

    @property
    def timeline(self) -> Timeline:
        """The predicted timeline of a step."""
        program = (
            Schedule.parse(self.order)
            if self.order
            else build_schedule(
                self.schedule,
                self.chunks,
                self.placement,
                self.modes,
                self.split,
                offload=self.offload,
                whole_loss=self.whole_loss,
            )
        )
        return simulate(program, self.stages, transfer=self.hops[1:])

    def build(
        self, model: nn.Module, *, devices: Sequence[Device] | None = None, sample: Any = None, **options: Any
    ) -> GPipe:
        """Build the planned pipe from ``model``. Pass :attr:`step_arguments` to its :meth:`gpipe.GPipe.step`.

        Args:
            model: the planned model, or one with the same layers. They are moved to the devices, not copied.
            devices: the same number of devices, to use instead of the planned ones.
            sample: an input that shows the order in which a model with its own forward uses its modules. The default
                is the sample of :func:`gpipe.plan`, if the plan was made in this process.
            options: further arguments of :class:`gpipe.GPipe`.

        Returns:
            The pipe.

        Raises:
            ValueError: ``model`` is not the planned one (the message names the first layer that differs), the planned
                devices are hypothetical or not available, or the number of ``devices`` differs.
            TypeError: ``model`` cannot be split, as for :class:`gpipe.GPipe`.
        """
        if devices is None and self.is_estimate:
            raise ValueError(
                f"devices: the plan is for {len(self.devices)} hypothetical devices ({self.devices[0]}); pass real "
                "ones, as in plan.build(model, devices=[...])"
            )
        places = check_devices(self.devices if devices is None else devices, len(self.devices))
        if len(places) < len(self.devices):
            raise ValueError(f"devices: the plan is for {len(self.devices)} devices, got {len(places)}")
        self._expect(self._list_layers(model))
        if self.own_forward:
            given = self._here.sample if sample is None else sample
            options |= {"blocks": self._names, "sample": given}
        if self.offload:
            options = {"offload": True, **options}
        pipe = GPipe(
            model,
            self.sizes,
            devices=[places[place] for place in self.placement],
            chunks=self.chunks,
            checkpoint=self.modes,
            **options,
        )
        self._here.pipe = weakref.ref(pipe)
        return pipe

    def _list_layers(self, model: nn.Module) -> tuple[LayerKey, ...]:
        """Return the layers of a model, or its modules with the names of the planned blocks."""
        if self.own_forward == isinstance(model, nn.Sequential):
            planned = "a model with its own forward" if self.own_forward else "an nn.Sequential"
            raise ValueError(f"model: expected the planned model, {planned}; got a {type(model).__name__}")
        if not self.own_forward:
            expect_sequential(model)
            return layer_keys(model.named_children())
        modules = dict(model.named_modules())
        return layer_keys((name, modules[name]) for name in self._names if name in modules)

    @property
    def _names(self) -> list[str]:
        return [key.name for key in self.layers]

    def _expect(self, found: Sequence[LayerKey], name: str = "model") -> None:
        if len(found) != len(self.layers):
            raise ValueError(
                f"{name}: expected the planned model, with {len(self.layers)} layers; got one with {len(found)}"
            )
        for k, (planned, here) in enumerate(zip(self.layers, found, strict=True)):
            if planned != here:
                raise ValueError(f"{name}: expected the planned model, whose layer {k} is {planned}; got {here} there")

    @property
    def step_arguments(self) -> dict[str, Any]:
        """The arguments for :meth:`gpipe.GPipe.step` in addition to the mini-batch and the loss.

        Pass them as ``**plan.step_arguments``. They do not include ``reduction``, which belongs to the loss. A searched
        schedule needs the planned number of micro-batches; ``schedule=plan.schedule`` runs mini-batches of any size,
        with a schedule that the pipe searches itself.
        """
        return {"schedule": Schedule.parse(self.order) if self.order else self.schedule}

    def verify(
        self,
        x: Any,
        y: Any = None,
        *,
        loss_fn: Callable[..., Any] | None = None,
        reduction: str | None = None,
        pipe: GPipe | None = None,
    ) -> Verification:
        """Train for some steps, and compare measured with predicted time and memory.

        Gradients and buffers are restored afterwards. The states of random number generators are not.

        Args:
            x: a mini-batch with the planned number of rows.
            y: the target.
            loss_fn, reduction: as for :meth:`gpipe.GPipe.step`; by default as passed to :func:`gpipe.plan`. If
                ``loss_fn`` is a module, a copy is called.
            pipe: the pipe; by default the last one that :meth:`build` returned, if it still exists.

        Returns:
            Predicted and measured seconds and bytes, and the timeline of one step; ``str()`` is a table. With
            ``offload=True``, bytes are not measured.

        Raises:
            ValueError: no pipe was built, or it no longer exists; the balance, chunks or layers of ``pipe``, or the
                rows of ``x``, differ from the plan; or the planned schedule cannot wait for this loss.
            TypeError: ``loss_fn`` is missing, and the model computes no loss.
        """
        pipe = self._here.pipe() if pipe is None else pipe
        if pipe is None:
            raise ValueError(
                "pipe: expected a pipe, but none was built, or it no longer exists; keep the pipe that "
                "plan.build(model) returns, or pass pipe="
            )
        for name, planned in (("balance", self.balance), ("chunks", self.chunks)):
            if getattr(pipe, name) != planned:
                raise ValueError(f"pipe: expected the planned {name} {planned}, got one with {getattr(pipe, name)}")
        x = as_input(pipe[:], x)
        if count_rows(x) != self.rows:
            raise ValueError(
                f"x: expected the planned {self.rows} rows, got {count_rows(x)}; for these, make a new plan"
            )
        kinds = [key.kind for key in self.layers]  # a pipe may have replaced a batch norm with a deferred one
        self._expect(
            [replace(key, kind=kind) for key, kind in zip(self._list_layers(pipe[:]), kinds, strict=True)], "pipe"
        )
        given = self._here.loss
        if reduction is None and loss_fn in (None, given.loss_fn):
            reduction = given.reduction
        loss = {"loss_fn": fresh(given.loss_fn if loss_fn is None else loss_fn), "reduction": reduction}
        return verify(self, pipe, x, y, loss)

    @property
    def rank_arguments(self) -> dict[str, Any]:
        """The arguments for :class:`gpipe.distributed.Rank` in addition to the model and the process groups.

        Pass them as ``**plan.rank_arguments``. Each rank runs the stages of one device. ValueError if the plan keeps
        parameters on the host.
        """
        if self.offload:
            raise ValueError("the plan keeps parameters on the host (offload=True), which is for one process: GPipe")
        ranks = list(self.placement)
        found = {"balance": self.balance, "chunks": self.chunks, "checkpoint": self.checkpoint, "ranks": ranks}
        return {**found, "blocks": self._names} if self.own_forward else found

    def to_json(self) -> str:
        """Return the plan as JSON, for :meth:`from_json`.

        Returns:
            The JSON text. It does not contain the loss and the sample.
        """
        return documents.dump(self, _SCHEMA)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Load a plan from the JSON that :meth:`to_json` returned.

        Args:
            text: the JSON text.

        Returns:
            An equal plan.

        Raises:
            TypeError: ``text`` is not a str.
            ValueError: ``text`` is not the JSON of a plan. The message names the invalid part.
        """
        plan = documents.load(Plan, text, "plan", _SCHEMA)
        stages = {name: len(getattr(plan, name)) for name in ("sizes", "placement", "modes", "stages", "hops")}
        devices = {len(plan.devices), len(plan.memory), len(plan.predicted.bytes)}
        fits = {*plan.placement} == {*range(len(plan.devices))} and {*(plan.split or ())} <= {*range(len(plan.sizes))}
        fits &= plan.schedule in (*SCHEDULES, *([SEARCH] if plan.order else [])) and min(plan.rows, plan.chunks) > 0
        fits &= plan.schedule in WAITING or not plan.whole_loss
        if len({*stages.values()}) + len(devices) > 2 or sum(plan.sizes) != len(plan.layers) or not fits:
            raise ValueError(
                f"plan: expected sizes that sum to {len(plan.layers)} layers, lists with one element per stage, "
                f"and {len(plan.devices)} devices; got sizes={list(plan.sizes)}, placement={list(plan.placement)}, "
                f"lengths {stages}, schedule={plan.schedule!r}, whole_loss={plan.whole_loss}, split={plan.split}, "
                f"rows={plan.rows} and chunks={plan.chunks}"
            )
        check_modes(plan.modes)
        return plan

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file, in the format given by the extension of ``path``.

        Args:
            path: ``.html`` writes a page with the report and the timeline, ``.json`` the text of :meth:`to_json`, and
                ``.txt`` the report.

        Raises:
            ValueError: ``path`` has a different extension.
        """
        save(
            path,
            {
                ".html": lambda: page("Plan", str(self), self._picture()),
                ".json": self.to_json,
                ".txt": lambda: f"{self}\n",
            },
        )

    def __str__(self) -> str:
        return report(self)

    def _repr_html_(self) -> str:
        return fragment(str(self), self._picture())

    def _picture(self) -> str:
        return svg([("predicted, actions only", self.timeline)])
