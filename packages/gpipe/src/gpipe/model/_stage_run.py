"""The stages of a model in one run: each lets the forward of a micro-batch go on, and has the backward of its part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from streams import is_accelerator, use_device, use_stream

from .._flatten._cache import without_cache
from ..checkpoint._random import CellRNG
from ..engine._accumulate import DeferredGradients, nodes_below
from ..engine._block import Block
from ..engine._cell import Cell, backward, backward_input
from ..engine._left_behind import guard
from ..engine._losses import Losses
from ..engine._spec import RunSpec
from ..engine._stage import Stage
from ..engine._stage_run import StageRun, StageRuns, Trained
from ..engine._tied import Tied, contents_of
from ..transport._copy import Copy, StagePlace, carriers
from ..transport._transport import AnyChannel
from ..values._leaves import Activation
from ._facts import Facts, joined_facts, kind_of
from ._forward import Forward
from ._left import Left
from ._stage import Divided
from ._tensors import Turn

_log = logging.getLogger("gpipe")


class ModelRun(StageRuns):
    """The forwards of all micro-batches, in one run.

    Args:
        start: calls a function in a thread of a forward.
        known: what forwards of earlier runs have shown, by kind.

    Attributes:
        replays: whether the output is computed for all rows, from what blocks have returned.
        places: the device, stream and copy streams of each stage.
        devices: the devices of the stages.
        copies: whether there are several.
        is_known: whether earlier forwards have done the same.
        kind: what the forwards have in common with earlier ones that do the same.
    """

    def __init__(
        self,
        divided: Divided,
        start: Callable[[Callable[[], None]], Any],
        places: Mapping[int, StagePlace],
        spec: RunSpec,
        tied: Tied,
        known: dict[Any, Facts],
    ) -> None:
        self.model, self._divided = divided.model, divided
        self.stages: Sequence[Stage] = divided.stages
        self.places, self.spec = places, spec
        self.start = start
        self.replays = spec.replays
        self.kind: tuple[Any, ...] = ()
        self.is_known = False
        self._known, self._shown = known, list[Facts]()
        self.devices = {place[0] for place in places.values()}
        self.copies = len(self.devices) > 1
        self.forwards: dict[int, Forward] = {}
        self.left = Left()
        self._tied, self._deferred = tied, DeferredGradients()
        self._homes: dict[int, int] = {}
        self._copied: dict[tuple[int, int], Tensor] = {}
        self._blocks: dict[nn.Module, Block] = {}
        self._carriers: dict[tuple[int, int], tuple[Copy | None, Copy | None]] = {}

    def of(
        self,
        spec: RunSpec,
        stage: Stage,
        random: CellRNG,
        arrival: AnyChannel,
        departure: AnyChannel | Losses,
        trained: Trained,
    ) -> StageRun:
        self._deferred = trained.deferred
        random.module = None  # numbers belong to calls of blocks, whatever the stage
        return ModelStageRun(self, spec, stage, random, arrival, departure, trained)

    @contextmanager
    def walking(self) -> Iterator[None]:
        # Modules hold the copies of this run now, if stages share tensors.
        for stage in reversed(self.stages):
            self._homes.update(dict.fromkeys(contents_of(stage.module).tensors, stage.index))
        try:
            with self._divided.answering(), without_cache(self.model):
                yield
            if not self.replays:
                self._known.setdefault(self.kind, Facts((), frozenset(), frozenset(), changes_inputs=False))
        finally:
            for forward in self.forwards.values():
                forward.abandon()
            self.forwards.clear()

    def forward(self, microbatch: int, inputs: Activation) -> Forward:
        """Return the forward of a micro-batch; a new one in the turn of the first stage."""
        if microbatch not in self.forwards:
            mode = self.model.training, self.spec.trains, torch.is_inference_mode_enabled()
            self.kind = self.kind or (*mode, *(kind_of(inputs.value) if self.replays else ()))
            known = self._known.get(self.kind)
            self.is_known = known is not None
            self.forwards[microbatch] = Forward(self, microbatch, inputs, known if self.replays else None)
        return self.forwards[microbatch]

    def learn(self, forward: Forward) -> None:
        """Keep what a forward has shown."""
        if forward.uses is not None:
            uses = forward.uses
            used, changed = frozenset(forward.used), frozenset(uses.changed)
            self._shown.append(Facts(uses.answers, used, changed, uses.changes_inputs))

    @property
    def facts(self) -> Facts:
        """What the forwards of this run have shown."""
        return joined_facts(self._shown, type(self.model).__name__)

    def block(self, stage: int, microbatch: int, module: nn.Module) -> Block | None:
        """Return what recomputes ``module`` if this micro-batch is checkpointed, else None."""
        if microbatch >= self.spec.size.checkpoint_stops[stage]:
            return None
        if module not in self._blocks:
            own = self._divided.stages[stage]
            self._blocks[module] = Block(own, own.recomputation_of(module))
        return self._blocks[module]

    def tell_of_objects(self, module: nn.Module) -> None:
        if module not in self._blocks:
            return
        _log.warning(
            "a %s gets objects of which is not known which tensors they hold; it is not recomputed, and keeps what its "
            "operations save",
            type(module).__name__,
        )

    def tell_of_order(self, name: str, stage: int, later: int) -> None:
        own = self._divided.stages[stage]
        if not own.has_told:
            own.has_told = True
            _log.warning(
                "block %r of partition %d is called after blocks of partition %d, which computes it with copies of its "
                "parameters; if blocks are called in another order than the model registers them, name them in that "
                "order: GPipe(model, blocks=[...])",
                name,
                stage,
                later,
            )

    @contextmanager
    def on_streams(self) -> Iterator[None]:
        """Make the streams of all stages current: the model may name a device of another stage than its turn is."""
        own = {device: stream for device, stream, _ in self.places.values() if is_accelerator(stream)}
        with ExitStack() as scope:
            # First the device, without a stream: another one would get a context of this process at the end.
            for device in [*own][:1]:
                scope.enter_context(use_device(device))
            for stream in own.values():
                scope.enter_context(use_stream(stream))
            yield

    def is_of_model(self, tensor: Tensor) -> bool:
        return id(tensor) in self._homes

    def parameter(self, tensor: Tensor, stage: int) -> Tensor:
        """Return a parameter or buffer of the model for an operation of ``stage``: a copy if it is that of another."""
        home = self._homes.get(id(tensor), stage)
        if home == stage:
            return tensor
        key = id(tensor), stage
        if key not in self._copied:
            with torch.set_grad_enabled(self.spec.trains):  # the model may be in no_grad() now
                copy = self._tied.copy(tensor, stage, self.places[stage][0])
            if copy is not tensor and copy.requires_grad:
                self._deferred.hold([copy], tied=True)
            self._copied[key] = copy
        return self._copied[key]

    def sent(self, tensor: Tensor, source: int, target: int, done: Any) -> Callable[[], Tensor]:
        """Send ``tensor`` to ``target``; return what receives it there, as a leaf."""
        forth = self._between(source, target)[0]
        if forth is None:
            return lambda: tensor.detach().requires_grad_(tensor.requires_grad)
        parcel = forth.send(Activation(tensor), after=done)
        return lambda: forth.receive(parcel).tensors[0]  # type: ignore[union-attr]

    def returned(self, gradient: Tensor, source: int, target: int) -> Callable[[], Tensor]:
        """Send a gradient from ``source`` back to ``target``; return what receives it there."""
        back = self._between(target, source)[1]
        if back is None:
            return lambda: gradient
        parcel = back.send([gradient])
        return lambda: back.receive(parcel)[0]  # type: ignore[index,return-value]

    def _between(self, a: int, b: int) -> tuple[Copy | None, Copy | None]:
        if (a, b) not in self._carriers:
            self._carriers[a, b] = carriers(self.places[a], self.places[b])
        return self._carriers[a, b]


class ModelStageRun(StageRun):
    """The turns of one stage in all forwards."""

    def __init__(
        self,
        run: ModelRun,
        spec: RunSpec,
        stage: Stage,
        random: CellRNG,
        arrival: AnyChannel,
        departure: AnyChannel | Losses,
        trained: Trained,
    ) -> None:
        super().__init__(spec, stage, random, arrival, departure, trained)
        self._run = run
        # By micro-batch, the turns of all stages.
        self._turns: dict[int, list[Turn]] = {}
        self._is_last = stage.index == run.stages[-1].index
        # Blocks have random numbers and contexts of their own for their recomputation.
        self._checkpoint_stop = self._late_losses = 0

    def forward(self, i: int) -> None:
        inputs = self._arrival.get_values(i)
        forward = self._run.forward(i, inputs)
        self._cells[i] = cell = Cell(inputs)
        turn = forward.go_on()
        self._turns[i] = forward.turns
        if self.stage.index:
            cell.inputs = Activation(tuple([each.leaf for each in turn.leaves.values()]))
        guard(self.stage, cell.inputs.tensors, i)
        sent = Activation(())
        if self._is_last:
            self._run.learn(forward)
            output, found = forward.take()
            used = {f"{call} {leaf}": tensor for (call, leaf), tensor in sorted(found.items())}
            cell.outputs = Activation((output, used) if self._run.replays else output)
            del output, found
            sent = self._sent(cell.inputs, cell.outputs, [])
            del self._run.forwards[i]
        self._end_forward(i)
        if not self._spec.trains:
            del self._turns[i]
        self._send(i, sent)

    def recompute(self, i: int) -> None:
        """Recompute the last block, which the backward needs first, while its gradients are on their way."""
        calls = self._turns[i][self.stage.index].calls
        if calls:
            calls[-1].early()

    def loss(self, i: int) -> None:
        with self._run.on_streams(), use_device(self.stage.device):
            super().loss(i)

    def backward(self, i: int) -> None:
        seeds = self._prepared(i)
        gradients = backward(self._cells[i], seeds, self._sums)
        del self._cells[i]
        self._deliver(i, gradients)

    def backward_input(self, i: int) -> None:
        seeds = self._prepared(i)
        self._deliver(i, backward_input(self._cells[i], seeds, self._sums, self.stage))

    def _prepared(self, i: int) -> list[Tensor | None]:
        """Complete the outputs of a cell by what later stages have used; return the gradients of all of them."""
        cell, turn = self._cells[i], self._turns[i][self.stage.index]
        seeds = list(self._seeds(i))
        self._expect_own(i)
        outputs = () if cell.outputs is None else cell.outputs.tensors
        arrived = [(turn.sent[key], [get() for get in gradients]) for key, gradients in turn.gradients.items()]
        cell.outputs = Activation((*outputs, *[tensor for tensor, _ in arrived]))
        turn.sent, turn.gradients, turn.calls = {}, {}, []  # freed as the backward goes on
        if not self.adds:
            self._hold(i)
        # In the order of the stages, since sums of floats depend on it.
        return [*seeds, *[sum(found[1:], found[0]) for _, found in arrived]]

    def _expect_own(self, i: int) -> None:
        """In the first run of its kind: expect the graph to end where the stage has begun."""
        turn = self._turns[i][self.stage.index]
        if i or not turn.first or self._run.is_known:
            return
        outputs = self._cells[i].outputs
        for node in nodes_below([*(() if outputs is None else outputs.tensors), *turn.sent.values()]):
            if node._sequence_nr() < turn.first:
                raise RuntimeError(_UNSEEN.format(type(self._run.model).__name__, node.name()))

    def _deliver(self, i: int, gradients: Sequence[Tensor | None]) -> None:
        """Send the gradients of leaves to the stages that computed them."""
        turns, j = self._turns.pop(i), self.stage.index
        leaves, turns[j] = turns[j].leaves.values(), Turn()
        if not j:
            self._arrival.put_gradients(i, list(gradients))
            return
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                arrives = self._run.returned(gradient, j, leaf.home)
                turns[leaf.home].gradients.setdefault(id(leaf.tensor), []).append(arrives)
        self._arrival.put_gradients(i, [])


_UNSEEN = (
    "between its blocks {} passes a tensor of an earlier stage to what torch does not show to function modes, such as "
    "a torch.autograd.Function ({}), so that its gradient would not get back; pass it tensor.clone(), or name a module "
    "around it as one of the blocks: GPipe(model, blocks=[...])"
)
