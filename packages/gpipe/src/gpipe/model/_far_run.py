"""The forwards of a run whose stages are in several processes, and the messages between their stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from .._cached_property import cached_property
from ..engine._stage_run import StageRun
from ..transport._transport import AnyChannel, Channel
from ..values._leaves import Activation
from ._elsewhere import Elsewhere
from ._far import FarTensors
from ._forward import Forward
from ._stage_run import ModelRun, ModelStageRun
from ._tensors import Tensors

Channels = Mapping[int, Mapping[int, AnyChannel]]
"""The channels between a stage in this process and a stage in another one, by one stage and then by the other."""


class FarRun(ModelRun):
    """The forwards of all micro-batches, in a process that has some of the stages.

    Args:
        elsewhere: the outputs of what other processes compute.
        args: as for :class:`ModelRun`.

    Attributes:
        into: the channel between each stage and each earlier stage, if exactly one of the two is in this process.
        out_of: the same channels, by the earlier stage first.
    """

    def __init__(self, elsewhere: Elsewhere, *args: Any) -> None:
        super().__init__(*args)
        elsewhere.forget()
        self.elsewhere, self.answer = elsewhere, elsewhere.call  # type: ignore[method-assign]
        into: dict[int, dict[int, AnyChannel]] = defaultdict(dict)
        out_of: dict[int, dict[int, AnyChannel]] = defaultdict(dict)
        for number, (a, b) in number_pairs(self.count).items():
            if self.is_own(a) != self.is_own(b):
                into[b][a] = out_of[a][b] = self.transport.between(a, b, number, f"between stages {a} and {b}")
        self.into: Channels = into
        self.out_of: Channels = out_of

    @property
    def of(self) -> Callable[..., StageRun]:
        return partial(FarStageRun, self)

    @cached_property
    def first(self) -> int:
        """The first stage of this process."""
        return min(self.places)

    @cached_property
    def last(self) -> int:
        """The last stage of this process."""
        return max(self.places)

    def is_own(self, stage: int) -> bool:
        return stage in self.places

    def tensors(self, microbatch: int) -> Tensors:
        return FarTensors(self, self.count, microbatch)

    def expect_free(self, tensor: Tensor, stage: int, microbatch: int) -> None:
        """Each process changes its own tensors, before its own turn."""

    def expect_drawing(self, generators: Sequence[str]) -> None:
        raise RuntimeError(
            f"between its blocks {type(self.model).__name__} draws from {generators[0]}, whose numbers may be others "
            "on each rank; draw in a block, or from torch"
        )

    def find_stage(self, tensor: Tensor) -> int | None:
        """Return the stage of a parameter or buffer of the model; None for any other tensor."""
        return self._homes.get(id(tensor))


def number_pairs(count: int) -> dict[int, tuple[int, int]]:
    """Return all pairs of ``count`` stages, by the number of their channel. Neighbors have the lowest numbers."""
    neighbors = [(b - 1, b) for b in range(1, count)]
    others = [(a, b) for a in range(count) for b in range(a + 2, count)]
    return dict(enumerate([*neighbors, *others], start=1))


class Quiet(Channel):
    """The channel between neighboring stages. It is empty, because tensors go directly to the stages that use them."""

    __slots__ = ()

    def __init__(self) -> None:
        def put(microbatch: int, payload: Any) -> None: ...

        self.get_values = lambda microbatch: Activation(())
        self.get_gradients = lambda microbatch: []
        self.put_values = self.put_gradients = put


class FarStageRun(ModelStageRun):
    """The turns of one stage in all forwards, when other processes have other stages."""

    _run: FarRun

    def __init__(self, run: FarRun, *args: Any) -> None:
        super().__init__(run, *args)
        j = self.stage.index
        self._is_last = j == run.last
        self._begins = j == run.first
        self._inputs = 0  # the number of tensors among the inputs of the model
        self._arrival = run.transport.entrance if self._begins else Quiet()
        if j < run.count - 1:
            self._departure = Quiet()

    def _receive_inputs(self, i: int) -> Activation:
        inputs = super()._receive_inputs(i)
        self._inputs = len(inputs.tensors)
        return inputs

    def _take_output(self, forward: Forward) -> Activation:
        output = super()._take_output(forward)
        return output if self._run.last == self._run.count - 1 else Activation(())

    def _prepare_backward(self, i: int) -> list[Tensor | None]:
        turns, j = self._turns[i], self.stage.index
        # Add the gradients of the latest stage first, as in a single process.
        for later in sorted(self._run.out_of[j], reverse=True):
            used = [key for key, leaf in turns[later].leaves.items() if leaf.home == j]
            for key, gradient in zip(used, self._run.out_of[j][later].get_gradients(i), strict=True):
                del turns[later].leaves[key]  # freed during the backward
                if gradient is not None:
                    turns[j].gradients.setdefault(key, []).append(partial(_itself, gradient))
        return super()._prepare_backward(i)

    def _deliver(self, i: int, gradients: Sequence[Tensor | None]) -> None:
        turns, j = self._turns[i], self.stage.index
        found = [*zip(turns[j].leaves.items(), gradients, strict=True)] if j else []
        for home, channel in self._run.into[j].items():
            channel.put_gradients(i, [gradient for (_, leaf), gradient in found if leaf.home == home])
        if j:
            found = [each for each in found if self._run.is_own(each[0][1].home)]
            turns[j].leaves, gradients = dict(pair for pair, _ in found), [gradient for _, gradient in found]
        super()._deliver(i, gradients)
        if j and self._begins:  # the first stage has the gradients of inputs
            self._arrival.put_gradients(i, [None] * self._inputs)


def _itself(gradient: Tensor) -> Tensor:
    return gradient
