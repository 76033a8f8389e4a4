"""Track the stage that computed each tensor of a forward, and replace tensors of earlier stages by local ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from streams import AbstractEvent, record_event

from .._torch import next_sequence_number
from ..engine._block import BlockForward
from ..transport._copy import StagePlace
from ..values._leaves import AsNonleaf, storage_id, version
from ._tree import map_tree


class Moves(Protocol):
    """Moves tensors between the stages of a run.

    Attributes:
        places: the device, stream and copy streams of each stage.
        devices: the devices of the stages.
        copies: whether there is more than one device.
        offloads: whether parameters are on the host.
    """

    places: Mapping[int, StagePlace]
    devices: set[torch.device]
    copies: bool
    offloads: bool

    def own(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or a clone if its memory will be freed with a parameter of its stage."""

    def is_of_model(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a parameter or buffer of the model."""

    def parameter(self, tensor: Tensor, stage: int) -> Tensor:
        """Return a parameter or buffer of the model for an operation of ``stage``."""

    def send(self, tensor: Tensor, source: int, target: int, done: AbstractEvent | None) -> Callable[[], Tensor]:
        """Send ``tensor`` to ``target``. Return a function that receives it there, as a leaf."""


class Leaf(NamedTuple):
    """A tensor of an earlier stage that a later stage uses.

    Attributes:
        tensor: the tensor of the earlier stage.
        home: the stage that computed it.
        leaf: the leaf of the later stage's graph.
        alias: the tensor that the model computes with, because a leaf must not be modified in place.
        version: the version of ``alias`` when it was created.
    """

    tensor: Tensor
    home: int
    leaf: Tensor
    alias: Tensor
    version: int


class Copied(NamedTuple):
    """A tensor without gradient that a later stage on a different device uses.

    Attributes:
        tensor: the tensor of the earlier stage.
        version: the version of ``tensor`` when it was copied.
        copy: the tensor that the model computes with.
        own: the version of ``copy`` when it was created.
        stage: the later stage.
    """

    tensor: Tensor
    version: int
    copy: Tensor
    own: int
    stage: int


class Turn:
    """The part of a forward that one stage computes.

    Attributes:
        leaves: the tensors of earlier stages that it uses, by the id of the original tensor.
        sent: its own tensors that later stages use, by id.
        gradients: functions that receive the gradients of ``sent`` tensors from later stages.
        calls: the calls of blocks that are recomputed.
        first: the sequence number of the first node of its graph.
        done: an event after all work that the stage has queued on its device.
    """

    __slots__ = ("calls", "done", "first", "gradients", "leaves", "sent")

    def __init__(self) -> None:
        self.leaves: dict[int, Leaf] = {}
        self.sent: dict[int, Tensor] = {}
        self.gradients: dict[int, list[Callable[[], Tensor]]] = {}
        self.calls: list[BlockForward] = []
        self.done: AbstractEvent | None = None
        self.first = 0


class Tensors:
    """Gives each operation of a forward the tensors of the current stage.

    Attributes:
        stage: the stage of the current turn, or of the latest one.
        turns: the turn of each stage.
    """

    def __init__(self, moves: Moves, stages: int) -> None:
        self.stage = 0
        self.turns = [Turn() for _ in range(stages)]
        self._moves = moves
        self._limits: list[int] = []  # the sequence number of the next node at the end of each turn
        self._copies: dict[int, Copied] = {}  # the latest copy of each tensor
        self._ahead: dict[int, Callable[[], Tensor]] = {}  # tensors on their way to the next block

    @property
    def turn(self) -> Turn:
        return self.turns[self.stage]

    def begin(self) -> None:
        """Begin the turn of the next stage."""
        self.stage += 1
        self.turn.first = next_sequence_number()

    def end(self, stage: int, arguments: Any) -> None:
        """End the turn, because the model calls a block of ``stage`` with ``arguments``."""
        self._limits.append(next_sequence_number())
        if self._moves.copies:
            self.turn.done = record_event(self._moves.places[self.stage][1])
            map_tree(arguments, partial(self._send_ahead, stage))

    def finish(self) -> None:
        """End the last turn."""

    def clear(self) -> None:
        """Release all tensors."""
        self.turns = []
        self._copies.clear()

    def arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a block of this stage."""
        found = map_tree(args, self.here), map_tree(kwargs, self.here)
        self._ahead.clear()
        return found

    def here(self, tensor: Tensor) -> Tensor:
        """Return the tensor that stands for ``tensor`` on this stage."""
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is None:
                return self._moves.parameter(tensor, self.stage)
            home = self._home(node)
            return tensor if home == self.stage else self._leaf(tensor, home).alias
        if self._moves.copies:
            is_of_model = self._moves.is_of_model(tensor)
            return self._moves.parameter(tensor, self.stage) if is_of_model else self._copy(tensor)
        return tensor

    def compute(self, function: Callable[..., Any], args: Any, kwargs: Any, here: Callable[[Tensor], Tensor]) -> Any:
        """Compute an operation with the tensors that ``here`` returns, and that are on this stage."""
        looked = map_tree(args, here)
        return self.place_output(function(*looked, **(map_tree(kwargs, here) if kwargs else kwargs)))

    def expect_present(self, name: str, stage: int) -> None:
        """Expect that this stage can compute the block ``name`` of an earlier ``stage``."""

    def place_output(self, output: Any, given: Any = ()) -> Any:
        """Return an output, computed from ``given``, on this stage's device. An operation may have set a different one.

        The output is moved right away, because in-place changes would be lost in a copy for a single operation.
        """
        if self._moves.offloads:
            output = map_tree(output, self._moves.own)
        return map_tree(output, self._move) if self._moves.copies else output

    def take_input(self, leaf: Tensor) -> Tensor:
        """Return the tensor that the model uses for ``leaf``, one of its inputs."""
        return self.entering(leaf)

    def entering(self, leaf: Tensor) -> Tensor:
        """Return the tensor that the model uses for ``leaf``, because a leaf must not be modified in place."""
        if not leaf.requires_grad:
            return leaf.detach()
        with torch.enable_grad():  # the model may be in no_grad() now, and use it outside later
            alias: Tensor = AsNonleaf.apply(leaf)  # type: ignore[no-untyped-call]
        return alias

    def _home(self, node: Node) -> int:
        """Return the stage in whose turn ``node`` was created. Autograd numbers the nodes of a thread in order."""
        return bisect_right(self._limits, node._sequence_nr())

    def _leaf(self, tensor: Tensor, home: int) -> Leaf:
        leaves = self.turn.leaves
        found = leaves.get(id(tensor))
        if found is None:
            # If a stage in between has modified it in place, that stage's tensor has the new values.
            for j in range(self.stage - 1, home, -1):
                between = self.turns[j].leaves.get(id(tensor))
                if between is not None and version(between.alias) != between.version:
                    return self._leaf(between.alias, j)
            self._expect_no_view_changed(tensor, home)
            leaf = self._receive(tensor, home)
            alias = self.entering(leaf)
            found = leaves[id(tensor)] = Leaf(tensor, home, leaf, alias, version(alias))
            self.turns[home].sent[id(tensor)] = tensor
        return found

    def _expect_no_view_changed(self, tensor: Tensor, home: int) -> None:
        """Raise RuntimeError if a stage after ``home`` has changed another view of the memory of ``tensor``."""
        for turn in self.turns[home + 1 : self.stage + 1]:
            for each in turn.leaves.values():
                if version(each.alias) != each.version and storage_id(each.tensor) == storage_id(tensor):
                    raise RuntimeError(
                        "between its blocks the model changes a tensor in place on a later stage than the one that "
                        "computed it, and then uses another view of its memory, of shape "
                        f"{tuple(tensor.shape)}, whose gradient would be wrong; let it change a clone"
                    )

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._moves.places[self.stage][0]) if self._is_elsewhere(tensor) else tensor

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is on the device of another stage."""
        device = tensor.device
        if device == self._moves.places[self.stage][0] or device not in self._moves.devices:
            return False
        return bool(tensor.dim()) or device.type != "cpu" or tensor.requires_grad  # torch accepts CPU scalars

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a tensor without gradient on this stage's device."""
        known = self._copies.get(id(tensor))
        if known is not None and known.version == version(tensor):
            if known.stage == self.stage:
                return known.copy
            if version(known.copy) != known.own or known.copy.is_inference():  # without a version counter
                return self.here(known.copy)
        if not self._is_elsewhere(tensor):
            return tensor
        places = self._moves.places
        home = max((j for j in range(self.stage) if places[j][0] == tensor.device), default=None)
        copy = self._move(tensor) if home is None else self._receive(tensor, home)
        self._copies[id(tensor)] = Copied(tensor, version(tensor), copy, version(copy), self.stage)
        return copy

    def _send_ahead(self, stage: int, tensor: Tensor) -> Tensor:
        """Send a tensor of this stage to ``stage`` before the worker of that stage is free to receive it."""
        (here, *_), (there, *_) = self._moves.places[self.stage], self._moves.places[stage]
        if tensor.requires_grad:
            is_own = tensor.grad_fn is not None and self._home(tensor.grad_fn) == self.stage
        else:
            is_own = id(tensor) not in self._copies and not self._moves.is_of_model(tensor)
        if is_own and tensor.device == here != there and id(tensor) not in self._ahead:
            self._ahead[id(tensor)] = self._moves.send(tensor, self.stage, stage, self.turn.done)
        return tensor

    def _receive(self, tensor: Tensor, home: int) -> Tensor:
        sent = self._ahead.pop(id(tensor), None)
        return (sent or self._moves.send(tensor, home, self.stage, self.turns[home].done))()
