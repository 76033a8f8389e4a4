"""The plan: what was chosen, what it is expected to take, and what else was looked at."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from torch import nn

from profiler import html

from .._gpipe import GPipe
from .._saving import save
from ..module._arguments import Device
from ..module._sequential import as_sequential
from ..timeline import Timeline
from ._data import LayerKey, PlanData, layer_keys
from ._distribute import Distribution, distribute
from ._json import dump, load
from ._page import body, page
from ._table import report
from ._update import update
from ._verify import Verification, verify


class Plan(PlanData):
    """How to train a model on some devices, and what that is expected to take. Made by :func:`gpipe.plan`.

    ``str()`` is a report; ``plan.build(model)`` makes the pipe.

    Attributes:
        balance: how many layers each stage gets.
        chunks: how many micro-batches.
        checkpoint: the mode of checkpointing of each stage, or for each of its layers whether it is computed again.
        schedule: the name of the schedule for :meth:`gpipe.GPipe.step`.
        predicted: seconds, bytes by kind and device, throughput, bubble.
        alternatives: what else was looked at, and why it was not taken.
        devices: one for each stage, as text.
        memory: what each device may hold, in bytes; None for any amount.
        rows: of the mini-batch.
        notes: how the figures came about.
        layers: of the model.
        sizes, modes, split: of the stages: layers, checkpointing, and which backwards are split. What has flags in
            ``modes`` is computed again inside of backwards, so that ``stages`` count that as backward.
        timeline: when which stage does what in a step, as predicted.
        stages: what each costs, for :attr:`timeline`.
        hops: the seconds from the stage before to each.
        replicas: how many pipes train the same model, each on its share of the rows; 1 without data parallelism.
        ranks: the rank of each stage within a replica: that of the process, or the place of the device.
        is_estimate: whether the devices are not there, so that nothing was measured.
        reduction: the seconds of a step in which the replicas average their gradients; 0.0 where there is one.
    """

    def build(
        self, model: nn.Module, *, devices: Sequence[Device] | None = None, sample: Any = None, **options: Any
    ) -> GPipe:
        """The pipe: ``model`` with this balance, these chunks and modes. Train it by ``step(schedule=plan.schedule)``.

        Where the plan has several replicas it is one of them, for its share of the rows.

        Args:
            model: the one that was planned for, or one with the same layers. They are moved to the devices, not copied.
            devices: instead of those that were planned for.
            sample: what the model is called with, for one that is no ``nn.Sequential``; by default that of the plan.
            options: more arguments of :class:`gpipe.GPipe`.

        Returns:
            The pipe.

        Raises:
            ValueError: another model, which is named by its first layer that differs; or the plan is for devices that
                are not there.
            TypeError: a model that is no ``nn.Sequential``, and no sample.
        """
        if devices is None and self.is_estimate:
            raise ValueError(
                f"devices: the plan is for {len(self.devices)} devices that are not there ({self.devices[0]}); give "
                "real ones, as in plan.build(model, devices=[...])"
            )
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected the one that was planned for, got {type(model).__name__}")
        layers = as_sequential(model, self._here.sample if sample is None else sample)
        self._expect(layer_keys(layers))
        pipe = GPipe(
            layers,
            self.sizes,
            devices=self.devices if devices is None else devices,
            chunks=self.chunks,
            checkpoint=self.modes,
            **options,
        )
        self._here.pipe = weakref.ref(pipe)
        return pipe

    def _expect(self, found: Sequence[LayerKey]) -> None:
        if len(found) != len(self.layers):
            raise ValueError(
                f"model: the plan is for another model, of {len(self.layers)} layers; this one has {len(found)}"
            )
        for k, (planned, here) in enumerate(zip(self.layers, found, strict=True)):
            if planned != here:
                raise ValueError(f"model: the plan is for another model; its layer {k} is {planned}, here it is {here}")

    def verify(
        self, x: Any, y: Any = None, *, loss_fn: Callable[[Any, Any], Any] | None = None, pipe: GPipe | None = None
    ) -> Verification:
        """Train some steps, and show what was measured beside what was predicted.

        Gradients and buffers are afterwards as they were; random numbers have been drawn.

        Args:
            x: a mini-batch, of the rows that were planned for.
            y: the target.
            loss_fn: by default that of the plan.
            pipe: by default the last one that :meth:`build` made.

        Returns:
            Seconds and bytes, predicted and measured, and the timeline of one step; ``str()`` is a table.

        Raises:
            ValueError: no pipe has been built, or there is no ``loss_fn``.
        """
        pipe = self._here.pipe() if pipe is None else pipe
        if pipe is None:
            raise ValueError("pipe: the plan has not been built; call plan.build(model) first, or give a pipe")
        loss_fn = loss_fn or self._here.loss_fn
        if loss_fn is None:
            raise ValueError("loss_fn: the plan was made without one; give it, as in verify(x, y, loss_fn=...)")
        return verify(self, pipe, x, y, loss_fn)

    def update(self, timeline: Timeline) -> Plan:
        """Search the balance again, with what cells took in a step instead of what layers took alone.

        Chunks, schedule and modes stay, and flags with their layers: ``pipe.rebalance(plan.update(timeline).balance)``
        brings a pipe to it between two steps. The balance stays where no other is expected to be faster.

        Args:
            timeline: of one step of a pipe with this plan, recorded by :func:`gpipe.record` after some to warm up.

        Returns:
            The new plan, which can be updated again.

        Raises:
            TypeError: ``timeline`` is none.
            ValueError: it is not one of one step with this plan; or the plan was read from JSON, which does not have
                what was measured of layers.
        """
        return update(self, timeline)

    def distribute(self) -> Distribution:
        """What each process is to be called with, if one runs each rank of each replica.

        ``Rank`` is :class:`gpipe.distributed.Rank`: ``Rank(model, **found.rank_arguments, group=...)``, then
        ``rank.step(x[place.rows], y[place.rows], **found.step_arguments)`` with ``place = found.place(rank)``.

        Returns:
            The arguments, which are the same in each process, and the place of each.
        """
        return distribute(self)

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads back as an equal plan.

        Returns:
            JSON.
        """
        return dump(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that :meth:`to_json` wrote.

        Args:
            text: JSON.

        Returns:
            An equal plan.

        Raises:
            TypeError: ``text`` is no text.
            ValueError: it is anything else; names the place.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: expected what Plan.to_json wrote, got {type(text).__name__}")
        return load(Plan, text)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file, as what the ending of ``path`` says.

        Args:
            path: ``.html`` is a page of its own with the memory of each device and the timeline; ``.json`` is what
                :meth:`from_json` reads; ``.txt`` is the report.

        Raises:
            ValueError: another ending.
        """
        save(path, {".html": lambda: page(self), ".json": self.to_json, ".txt": lambda: f"{self}\n"})

    def __str__(self) -> str:
        return report(self)

    def _repr_html_(self) -> str:
        return html.fragment(body(self))
