"""The stages of a model in one run. Each resumes the forward of a micro-batch, and runs the backward of its part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from streams import is_accelerator, use_device, use_stream

from .._cached_property import cached_property
from ..checkpoint._random import CellRNG
from ..engine._accumulate import DeferredGradients, nodes_below
from ..engine._block import Block
from ..engine._cell import Cell, backward, backward_input
from ..engine._leaked_graphs import guard
from ..engine._losses import Losses
from ..engine._spec import RunSpec
from ..engine._stage import Stage
from ..engine._stage_run import StageRun, StageRuns, Trained
from ..engine._tied import Tied, collect_contents
from ..transport._copy import Copy, carriers
from ..transport._transport import AnyChannel, Transport
from ..values._leaves import Activation, storage_id
from ._buffers import Held, outside
from ._cache import without_cache
from ._facts import NO_FACTS, Facts, get_kind, join_facts
from ._fixed import Fixed
from ._forward import Forward
from ._generators import Numbers
from ._left import Left
from ._owners import Owners
from ._stage import DividedModel
from ._tensors import Tensors, Turn

_log = logging.getLogger("gpipe")


class ModelRun(StageRuns):
    """The forwards of all micro-batches, in one run.

    Args:
        start: calls a function on a thread for forwards.
        known: the facts from forwards of earlier runs, by kind.
        numbers: the states of Python's and NumPy's generators.
        owners: the forwards that computed tensors between blocks, in this run and earlier ones.

    Attributes:
        count: the number of stages, in all processes.
        pick: returns the part of the model's output that the pipe returns.
        blocks: the blocks of the model.
        others: modules that are not blocks, but whose calls are handled in the same way.
        transport: the channels between stages.
        replays: whether the output is computed for the full mini-batch, from the outputs of blocks.
        places: the device, stream and copy streams of each stage.
        devices: the devices of the stages, and of parameters on the host.
        offloads: whether parameters are on the host.
        copies: whether there is more than one device.
        is_known: whether earlier runs had forwards of this kind.
        kind: the modes and properties of the inputs that may decide which operations a forward runs.
    """

    def __init__(
        self,
        divided: DividedModel,
        start: Callable[[Callable[[], None]], Any],
        transport: Transport,
        spec: RunSpec,
        tied: Tied,
        deferred: DeferredGradients,
        known: dict[Any, Facts],
        numbers: Numbers,
        owners: Owners,
    ) -> None:
        self.model, self.pick, self._divided_model = divided.model, divided.pick, divided
        self.blocks: Collection[nn.Module] = divided.division.blocks.values()
        self.others: Container[nn.Module] = divided.stages_of_others
        self.count = len(divided.parts)
        self.transport, self.places, self.spec = transport, transport.places, spec
        self.start = start
        self.replays = spec.replays
        self.kind: tuple[Any, ...] = ()
        self.is_known = False
        self._known, self._shown = known, list[Facts]()
        self.offloads = bool(tied.offloaded)
        self.devices = {place[0] for place in self.places.values()} | (
            {torch.device("cpu")} if self.offloads else set()
        )
        self._storages = set[int]().union(*(each.storages for each in tied.offloaded.values()))
        self.copies = len(self.devices) > 1
        self.forwards: dict[int, Forward] = {}
        self.left = Left()
        self.owners, self.numbers = owners, numbers
        owners.begin_run()
        self._tied, self._deferred = tied, deferred
        self._homes: dict[int, int] = {}
        self._copied: dict[tuple[int, int], Tensor] = {}
        self._own = {stage.index: stage for stage in divided.stages}
        self._blocks: dict[nn.Module, Block] = {}
        self._carriers: dict[tuple[int, int], tuple[Copy | None, Copy | None]] = {}

    @cached_property
    def outside(self) -> list[Held]:
        """The buffers of modules outside blocks."""
        found = outside(self.model, self._divided_model.division.blocks.values())
        return [module._buffers for module in found if module._buffers]

    @cached_property
    def fixed(self) -> Fixed:
        """The parameters of the model, and the buffers of its blocks."""
        blocks = self._divided_model.division.blocks.values()
        return Fixed(self.model, self._divided_model.parts, blocks, self._tied.accept, is_host=self.offloads)

    @property
    def of(self) -> Callable[..., StageRun]:
        return partial(ModelStageRun, self)

    @contextmanager
    def walking(self) -> Iterator[None]:
        # If stages share tensors, modules now hold the copies of this run.
        for index in reversed(range(self.count)):
            self._homes.update(dict.fromkeys(collect_contents(self._divided_model.parts[index]).tensors, index))
        self._homes.update(self._tied.guests())
        for module in self._divided_model.common:
            for tensor in collect_contents(module).tensors:
                self._homes.pop(tensor, None)
        self.left.begin(self._divided_model.division.blocks)
        try:
            with self._divided_model.answering(), without_cache(self.model):
                yield
            if not self.replays:
                self._known.setdefault(self.kind, NO_FACTS)
        finally:
            try:
                self._abandon()
            except BaseException:
                # After an interrupt, end all forwards before raising it: their threads would wait forever.
                self._abandon()
                raise

    def _abandon(self) -> None:
        while self.forwards:
            microbatch, forward = next(iter(self.forwards.items()))
            forward.abandon()
            del self.forwards[microbatch]

    def forward(self, microbatch: int, inputs: Activation) -> Forward:
        """Return the forward of a micro-batch, which is created in the turn of the first stage."""
        if microbatch not in self.forwards:
            mode = self.model.training, self.spec.trains, torch.is_inference_mode_enabled()
            self.kind = self.kind or (*mode, *(get_kind(inputs.value) if self.replays else ()))
            known = self._known.get(self.kind)
            self.is_known = known is not None
            self.forwards[microbatch] = Forward(self, microbatch, inputs, known if self.replays else None)
        return self.forwards[microbatch]

    def is_own(self, stage: int) -> bool:
        return True

    def tensors(self, microbatch: int) -> Tensors:
        return Tensors(self, self.count)

    def answer(self, name: str, module: nn.Module, function: Any, args: Any, kwargs: Any) -> Any:
        raise AssertionError("all blocks are in this process")

    def expect_free(self, tensor: Tensor, stage: int, microbatch: int) -> None:
        self.fixed.expect_free(tensor, stage, microbatch)

    def expect_drawing(self, generators: Sequence[str]) -> None: ...

    def end_forwards(self) -> None:
        """Log that a piece has drawn from generators of Python or NumPy although it was known not to."""
        if changed := self.numbers.end_forwards():
            _log.warning(
                "a block of %s, or its own operations between blocks, drew from %s, and did not before (or loss_fn "
                "did, or another thread); in this step, its numbers depend on the timing of threads; see Random "
                "numbers in the documentation",
                type(self.model).__name__,
                changed[0],
            )

    def learn(self, forward: Forward) -> None:
        """Record the facts from a forward."""
        if forward.uses is not None:
            uses = forward.uses
            used, changed = frozenset(forward.used), frozenset(uses.changed)
            drew = frozenset(forward.drew)
            numbers = {place: frozenset(found) for place, found in forward.numbers.items()}
            self._shown.append(Facts(uses.answers, used, changed, uses.changes_inputs, drew, numbers))

    @property
    def facts(self) -> Facts:
        """The combined facts from the forwards of this run."""
        return join_facts(self._shown, type(self.model).__name__)

    def block(self, stage: int, microbatch: int, module: nn.Module) -> Block | None:
        """Return the object that recomputes ``module``, or None if this micro-batch is not checkpointed."""
        if microbatch >= self.spec.size.checkpoint_stops[stage]:
            return None
        if module not in self._blocks:
            own = self._own[stage]
            self._blocks[module] = Block(own, own.get_recomputation(module))
        return self._blocks[module]

    def tell_of_objects(self, module: nn.Module) -> None:
        if module not in self._blocks:
            return
        _log.warning(
            "a %s receives objects that may hold tensors unknown to the pipe; it is not recomputed, and keeps the "
            "tensors that its operations save",
            type(module).__name__,
        )

    def tell_of_order(self, name: str, stage: int, later: int) -> None:
        own = self._own[stage]
        if not own.has_told:
            own.has_told = True
            _log.warning(
                "block %r of partition %d is called after blocks of partition %d, which computes it with copies of its "
                "parameters; if the model does not call its blocks in the order in which it registers them, name them "
                "in the order of their calls: GPipe(model, blocks=[...])",
                name,
                stage,
                later,
            )

    @contextmanager
    def on_streams(self) -> Iterator[None]:
        """Make the streams of all stages current, because the model may use the device of any stage in any turn."""
        own = {device: stream for device, stream, _ in self.places.values() if is_accelerator(stream)}
        with ExitStack() as scope:
            # Enter a device first, without its stream. Otherwise the exit would return to a different device, and
            # create a context of this process there.
            for device in [*own][:1]:
                scope.enter_context(use_device(device))
            for stream in own.values():
                scope.enter_context(use_stream(stream))
            yield

    def is_of_model(self, tensor: Tensor) -> bool:
        return id(tensor) in self._homes

    def parameter(self, tensor: Tensor, stage: int) -> Tensor:
        """Return a parameter or buffer of the model for an operation of ``stage``; a copy if another stage owns it."""
        guest = self._tied.find_guest(tensor, stage)
        if guest is not None:
            return guest
        home = self._homes.get(id(tensor), stage)
        if home == stage:
            return tensor
        key = id(self._tied.get_owner(tensor)), stage
        if key not in self._copied:
            with torch.set_grad_enabled(self.spec.trains):  # the model may be in no_grad() now
                copy = self._tied.copy(tensor, stage, self.places[stage][0])
            if copy is not tensor and copy.requires_grad:
                self._deferred.hold([copy], tied=True)
            self._copied[key] = copy
        return self._copied[key]

    def own(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or a clone if it is a view of a loaded parameter, whose memory will be freed."""
        return tensor.clone() if storage_id(tensor) in self._storages else tensor

    def send(self, tensor: Tensor, source: int, target: int, done: Any) -> Callable[[], Tensor]:
        """Send ``tensor`` to ``target``. Return a function that receives it there, as a leaf."""
        forth = self._between(source, target)[0]
        if forth is None:
            return lambda: tensor.detach().requires_grad_(tensor.requires_grad)
        parcel = forth.send(Activation(tensor), after=done)
        return lambda: forth.receive(parcel).tensors[0]  # type: ignore[union-attr]

    def send_back(self, gradient: Tensor, source: int, target: int) -> Callable[[], Tensor]:
        """Send a gradient from ``source`` back to ``target``. Return a function that receives it there."""
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
        random.module = None  # random numbers belong to calls of blocks, on any stage
        self._run = run
        # The turns of all stages, by micro-batch.
        self._turns: dict[int, list[Turn]] = {}
        self._is_last = stage.index == run.count - 1
        # Each block keeps its own random numbers and context for its recomputation.
        self._checkpoint_stop = self._late_losses = 0

    def forward(self, i: int) -> None:
        inputs = self._receive_inputs(i)
        forward = self._run.forward(i, inputs)
        self._cells[i] = cell = Cell(inputs)
        turn = forward.go_on(self.stage.index, self._collecting(i))
        self._turns[i] = forward.turns
        if self.stage.index:
            cell.inputs = Activation(tuple([each.leaf for each in turn.leaves.values()]))
        guard(self.stage, cell.inputs.tensors, i)
        sent = Activation(())
        if self._is_last:
            if i == self._spec.size.microbatches - 1:
                self._run.end_forwards()
            self._run.learn(forward)
            cell.outputs = self._take_output(forward)
            sent = self._detach_outputs(cell.inputs, cell.outputs, [])
            del self._run.forwards[i]
        self._end_forward(i)
        if not self._spec.trains:
            del self._turns[i]
        self._send(i, sent)

    def _receive_inputs(self, i: int) -> Activation:
        """Return the inputs of the model in the turn of the first stage, or wait for the previous stage."""
        return self._arrival.get_values(i)

    def _take_output(self, forward: Forward) -> Activation:
        """Return the output of the model, and the outputs of blocks that a replay uses, from a complete forward."""
        output, found = forward.take()
        used = {" ".join(map(str, key)): found[key] for key in sorted(found)}
        return Activation((output, used) if self._run.replays else output)

    def recompute(self, i: int) -> None:
        """Recompute the last block, which the backward needs first, while its gradients are on their way."""
        calls = self._turns[i][self.stage.index].calls
        if calls:
            calls[-1].recompute_early()

    def loss(self, i: int) -> None:
        with self._run.on_streams(), use_device(self.stage.device):
            super().loss(i)

    def backward(self, i: int) -> None:
        seeds = self._prepare_backward(i)
        gradients = backward(self._cells[i], seeds, self._sums)
        self._forget(i)
        self._left_backwards -= 1
        self._deliver(i, gradients)

    def backward_input(self, i: int) -> None:
        seeds = self._prepare_backward(i)
        self._deliver(i, backward_input(self._cells[i], seeds, self._sums, self.stage))

    def _prepare_backward(self, i: int) -> list[Tensor | None]:
        """Add the tensors that later stages used to the outputs of a cell. Return the gradients of all outputs."""
        cell, turn = self._cells[i], self._turns[i][self.stage.index]
        seeds = list(self._seeds(i))
        self._arrive(i)
        self._expect_own(i)
        outputs = () if cell.outputs is None else cell.outputs.tensors
        arrived = [(turn.sent[key], [get() for get in gradients]) for key, gradients in turn.gradients.items()]
        cell.outputs = Activation((*outputs, *[tensor for tensor, _ in arrived]))
        turn.sent, turn.gradients, turn.calls = {}, {}, []  # freed during the backward
        if not self.adds:
            self._hold(i)
        # Summed in the order of the stages, because sums of floats depend on it.
        return [*seeds, *[sum(found[1:], found[0]) for _, found in arrived]]

    def _expect_own(self, i: int) -> None:
        """Check in the first run of its kind that the graph of the stage has no nodes of earlier stages."""
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
                arrives = self._run.send_back(gradient, j, leaf.home)
                turns[leaf.home].gradients.setdefault(id(leaf.tensor), []).append(arrives)
        self._arrival.put_gradients(i, [])


_UNSEEN = (
    "between its blocks {} passes a tensor of an earlier stage to code that torch hides from function modes ({}), so "
    "that its gradient would be lost; pass it tensor.clone(), or name a module around it as one of the blocks: "
    "GPipe(model, blocks=[...])"
)
