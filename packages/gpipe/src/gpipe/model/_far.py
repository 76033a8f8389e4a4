"""Tensors of a forward whose stages are in several processes. Each process runs the whole forward.

A tensor is either known to every process, because it is computed from the model's inputs alone, or belongs to the
stage that computes it. In other processes, such a tensor has a shape but no values: it is on ``meta``. So each process
can track which tensors of other stages its own stages use, and which of its tensors the other stages use. Per
micro-batch, a stage sends a single message to each later stage in another process. It contains all tensors that the
later stage uses, in the order of their use::

    process 0     stage 0 computes | stage 1 on meta: it uses x and mask of stage 0 --> send (x, mask)
    process 1     stage 0 on meta  | stage 1 uses x, mask: <-- receive; computes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from .._current import current
from ..transport._transport import AnyChannel
from ..values._by_tensor import ByTensor
from ..values._leaves import Activation, storage_id, version
from ._elsewhere import Elsewhere, bare, first_line
from ._tensors import Leaf, Moves, Tensors
from ._tree import map_tree


class FarMoves(Moves, Protocol):
    """Moves tensors between the stages of a run, which are in several processes.

    Attributes:
        model: the model.
        elsewhere: the outputs of what other processes compute.
        into: the channel between each stage and each earlier stage, if exactly one of the two is in this process.
    """

    model: nn.Module
    elsewhere: Elsewhere
    into: Mapping[int, Mapping[int, AnyChannel]]

    def is_own(self, stage: int) -> bool:
        """Return whether ``stage`` is in this process."""

    def find_stage(self, tensor: Tensor) -> int | None:
        """Return the stage of a parameter or buffer of the model; None for any other tensor."""


class FarTensors(Tensors):
    """Gives each operation the tensors of the current stage: received ones, or tensors on ``meta``.

    Args:
        microbatch: the micro-batch of the forward.
    """

    def __init__(self, moves: FarMoves, stages: int, microbatch: int) -> None:
        super().__init__(moves, stages)
        self._far, self._microbatch, self._model = moves, microbatch, type(moves.model).__name__
        self._homes = ByTensor[int]()
        self._changed: dict[int, tuple[Tensor, int]] = {}  # by storage
        self._arrived: dict[int, Iterator[Tensor]] = {}  # for this turn, by stage

    def end(self, stage: int, arguments: Any) -> None:
        self.finish()

    def finish(self) -> None:
        channels = self._far.into[self.stage]
        if not self._far.is_own(self.stage):
            for home, channel in channels.items():
                used = [leaf.tensor for leaf in self.turn.leaves.values() if leaf.home == home]
                channel.put_values(self._microbatch, Activation(tuple(used)))
            return
        for home in channels:
            if next(self._messages(home), None) is not None:
                raise self._differs(home)
        self._arrived = {}

    def clear(self) -> None:
        super().clear()
        self._homes.clear()
        self._changed.clear()

    def take_input(self, leaf: Tensor) -> Tensor:
        # An input that requires grad belongs to the first stage, because that stage's process receives its gradient.
        if not leaf.requires_grad:
            return super().take_input(leaf)
        return self._belongs(super().take_input(leaf) if self._far.is_own(0) else bare(leaf), 0)

    def here(self, tensor: Tensor) -> Tensor:
        home = self._find_stage(tensor)
        if home is None:
            return self._move(tensor) if self._moves.copies else tensor
        if home == self.stage:
            return tensor
        if self._far.is_own(home) and self._far.is_own(self.stage) and self._moves.is_of_model(tensor):
            return self._moves.parameter(tensor, self.stage)
        if home > self.stage:
            raise self._too_early(tensor, home)
        return self._leaf(tensor, home).alias

    def compute(self, function: Callable[..., Any], args: Any, kwargs: Any, here: Callable[[Tensor], Tensor]) -> Any:
        given = _tensors_in((args, kwargs))
        is_local = any(self._find_stage(tensor) is not None for tensor in given)
        draws = current.work.rng.draws
        if is_local and not self._far.is_own(self.stage):
            output = self._without_data(function, map_tree(args, here), map_tree(kwargs, here))
        else:
            fixed = [(tensor, version(tensor)) for tensor in given if self._find_stage(tensor) is None and is_local]
            output = function(*map_tree(args, here), **map_tree(kwargs, here))
            for tensor, before in fixed:
                if version(tensor) != before:
                    self._takes_over(tensor)
        if not is_local and current.work.rng.draws == draws:
            return super().place_output(output)
        if not is_local and not self._far.is_own(self.stage):
            output = map_tree(output, bare)  # random numbers of the other process
        return self.place_output(output, given)

    def place_output(self, output: Any, given: Any = ()) -> Any:
        common = {id(tensor) for tensor in _tensors_in(given) if self._find_stage(tensor) is None}
        output = super().place_output(output) if self._far.is_own(self.stage) else output
        return map_tree(output, lambda tensor: tensor if id(tensor) in common else self._belongs(tensor, self.stage))

    def expect_present(self, name: str, stage: int) -> None:
        raise RuntimeError(
            f"block {name!r} of stage {stage} is called after blocks of stage {self.stage}, which may be on another "
            "rank; give an input of the model, which shows the order of its blocks: Rank(model, sample=...), and give "
            "blocks that are called several times to one stage: balance="
        )

    def _find_stage(self, tensor: Tensor) -> int | None:
        """Return the stage of ``tensor``, or None if every process has it."""
        found = self._homes.get(tensor)
        if found is not None:
            return found
        home = self._far.find_stage(tensor)
        if home is None and self._changed and storage_id(tensor) in self._changed:
            return self._changed[storage_id(tensor)][1]
        if home is None and tensor.is_meta:
            raise RuntimeError(
                f"between its blocks {self._model} uses a tensor of shape {tuple(tensor.shape)} that a block of "
                "another rank has left in an attribute, or in an object; let the block return it"
            )
        return home

    def _belongs(self, tensor: Tensor, stage: int) -> Tensor:
        self._homes[tensor] = stage
        return tensor

    def _leaf(self, tensor: Tensor, home: int) -> Leaf:
        found = super()._leaf(tensor, home)
        self._belongs(found.alias, self.stage)
        return found

    def _receive(self, tensor: Tensor, home: int) -> Tensor:
        if not self._far.is_own(self.stage):
            return bare(tensor).detach().requires_grad_(tensor.requires_grad)
        if self._far.is_own(home):
            return super()._receive(tensor, home)
        found = next(self._messages(home), None)
        if found is None or found.shape != tensor.shape:
            raise self._differs(home)
        return found

    def _messages(self, home: int) -> Iterator[Tensor]:
        if home not in self._arrived:
            message = self._far.into[self.stage][home].get_values(self._microbatch)
            self._arrived[home] = iter(message.tensors)
        return self._arrived[home]

    def _without_data(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute an operation of another process on ``meta``."""
        try:
            output, changes = self._far.elsewhere.operation(function, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            name = getattr(function, "__name__", repr(function))
            raise RuntimeError(
                f"between its blocks {self._model} computes {name} with tensors of stage {self.stage}, which is on "
                f"another rank, so that this one has no values of them: {first_line(error)}; compute it in a block, or "
                "use a GPipe"
            ) from error
        for tensor in changes:
            self._takes_over(tensor)
        return output

    def _takes_over(self, tensor: Tensor) -> None:
        """Note that a common tensor now belongs to the current stage, which has modified it with its own values."""
        self._changed[storage_id(tensor)] = tensor, self.stage

    def _too_early(self, tensor: Tensor, home: int) -> RuntimeError:
        named = (*self._far.model.named_parameters(), *self._far.model.named_buffers())
        name = next((name for name, each in named if each is tensor), "a parameter")
        return RuntimeError(
            f"{name!r} belongs to stage {home}, because of the place where the model registers it, but the model uses "
            f"it between blocks of stage {self.stage} already, which may be on another rank; give an input of the "
            "model, which shows the order: Rank(model, sample=...)"
        )

    def _differs(self, home: int) -> RuntimeError:
        return RuntimeError(
            f"the forward of {self._model} was another one on the rank of stage {home} than here: stage {self.stage} "
            "would use other tensors of it; it must depend on the inputs alone, not on values of the rank, such as "
            "Python's random numbers"
        )


def _tensors_in(value: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tree(value, note)
    return found
