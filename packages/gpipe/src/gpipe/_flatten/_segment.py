"""The layers of a flattened model: segments and blocks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._current import doing
from ..engine._loss_value import has_own_loss, own_loss
from ..skip import Namespace, Skippable, pop, skippable, stash
from ..values._constants import Note
from ._calls import WITH_SAMPLE, Calls, Key, Like, is_as_then, like
from ._collected import collecting
from ._ending import Ending, Recording, Returned
from ._inputs import Inputs
from ._names import Part
from ._own_loss import OwnLoss, split_loss_only
from ._placeholders import computed
from ._script import Value, output_name, recipe_of, restored, structure_of
from ._skeleton import followers
from ._standins import Stop, Tape
from ._tree import flattened

Pick = Callable[[Any], Any]

_recording: ContextVar[Recording | None] = ContextVar("gpipe.recording", default=None)
"""What the last segment of a model that computes its own loss fills, in place of the output; workers see it too."""


def picker(pick: str | Pick | None) -> Pick:
    if callable(pick):
        return pick
    if pick is not None and not isinstance(pick, str):
        raise TypeError(f"pick must be the name of a field of what the model returns, or a function; got {pick!r}")
    return main_field if pick is None else partial(_field, pick)


def _field(name: str, output: Any) -> Any:
    return output[name] if isinstance(output, dict) else getattr(output, name)


def main_field(output: Any) -> Any:
    if not isinstance(output, dict):
        return own_loss(output) if has_own_loss(output) else output
    found = next((name for name in ("loss", "logits", "last_hidden_state") if output.get(name) is not None), None)
    return output[found] if found else next(value for value in output.values() if isinstance(value, Tensor))


@skippable()
class Segment(Part):
    """What a model does before its first block, between two trunks, or after its last block.

    It runs the model's own forward with stand-ins for all that belongs elsewhere.

    Args:
        calls: what the model did with the sample.
        inputs: the sample; its tensors skip from segment to segment.
        names, first: of the blocks that follow, and the number of the first of them. The last segment has none.
        number: of this segment.
        pick: what the last segment makes of what the model returns.

    Attributes:
        done: the leaves of what the block before returned in the sample.
        ending: in the last segment of a model that computes a loss: how the pipe makes the whole output.
        own_loss: there, how the loss of a mini-batch is computed.
    """

    ending: Ending | None = None
    own_loss: OwnLoss | None = None

    def __init__(
        self,
        net: nn.Module,
        calls: Calls,
        inputs: Inputs,
        *,
        names: Sequence[str],
        first: int,
        number: int,
        namespace: Namespace,
        pick: Pick,
    ) -> None:
        super().__init__(net, "")
        self._names = list(names)
        self.first = first
        self.done = calls.blocks[first - 1].outputs if number else []
        self._keywords = frozenset(inputs.kwargs)
        # Else a single mapping stands for named arguments, as batches of a data loader do.
        self._takes_mapping = isinstance(next(iter(inputs.args), None), Mapping)
        self._number = number
        self.pick = pick
        tensors = range(len(inputs.tensors()))
        self._came = [_skip(k, number) for k in tensors] if number else []
        self._goes = [_skip(k, number + 1) for k in tensors] if names else []
        self._needs = calls.skips(lambda source, segment: segment == number)
        self._gives = calls.skips(lambda source, _: source.segment == number and not source.is_block)
        self._written = calls.written
        self.__dict__["stashable_names"] = frozenset([*self._goes, *self._gives])
        self.__dict__["poppable_names"] = frozenset([*self._came, *self._needs])
        vars(self)["twins"] = followers(net)
        Skippable.isolate(self, namespace)

    def forward(self, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        """From inputs of the model, or the block before, to what the next block needs, or the result."""
        carried: dict[str, Any] = {}
        if self._number:
            (carried,) = args
            tensors = []
            for name in self._came:
                tensors.append((yield pop(name)))
            inputs = Inputs(*restored(carried["inputs"].content, tensors))
            loss_only = carried["loss_only"]
        else:
            if len(args) == 1 and not kwargs and not self._takes_mapping:
                args, kwargs = Inputs.of(args[0])
            loss_only, kwargs = split_loss_only(kwargs)
            inputs = Inputs(args, kwargs)
            tensors = self._expect_few(inputs)
        for name, tensor in zip(self._goes, tensors, strict=False):
            yield stash(name, tensor)
        given = {}
        for title, key in self._needs.items():
            tensor = yield pop(title)
            if tensor is not None:
                given[key] = tensor.clone() if key in self._written else tensor
        tape = self._tape(carried, tensors, given)
        if not self._names:
            return self._result(tape, inputs, loss_only)
        self.run(tape, inputs)
        for title, (module, call, place) in self._gives.items():
            calls = tape.returned.get(module, [])
            found = calls[call][0][place] if call < len(calls) else None
            yield stash(title, computed(found, repr(module)))
        recipe, values = recipe_of(tape.arguments, tape.fakes, self._names, self.first)
        return {
            "values": values,
            "recipe": Note(recipe),
            "inputs": carried["inputs"] if self._number else Note(structure_of(*inputs.leaves(), "the model")),
            "shapes": tape.shapes(),
            "loss_only": loss_only,
            "collected": tape.collected,
        }

    def _result(self, tape: Tape, inputs: Inputs, loss_only: Mapping[str, Any]) -> Any:
        """What is picked of the output of the model, or what the caller of the pipe makes one for all rows of."""
        recording = _recording.get()
        if recording is not None and recording.ending in (self.ending, self.own_loss and self.own_loss.ending):
            self.run(tape, inputs)
            recording.shapes = tape.shapes()
            return recording.ending.recorded(self, tape)
        inputs = inputs._replace(kwargs={**inputs.kwargs, **loss_only})
        return computed(self.pick(self.run(tape, inputs)), "the output")

    @contextmanager
    def recording(self, ending: Ending) -> Iterator[Recording]:
        """A context in which this segment, the last one, returns what :meth:`whole` needs in place of the output."""
        recording = Recording(ending)
        token = _recording.set(recording)
        try:
            yield recording
        finally:
            _recording.reset(token)

    def whole(self, inputs: Inputs, found: Returned, recording: Recording) -> Any:
        return computed(recording.ending(self, inputs, found, recording.shapes), "the output")

    def _tape(self, carried: dict[str, Any], tensors: Sequence[Tensor | None], given: Mapping[Key, Tensor]) -> Tape:
        values = carried.get("values", {})
        done = [
            values.get(output_name(self.first - 1, m)) if isinstance(leaf, Like) else leaf
            for m, leaf in enumerate(self.done)
        ]
        near = next((each for each in [*values.values(), *tensors] if each is not None), torch.empty(0))
        shapes, collected = carried.get("shapes", {}), carried.get("collected", {})
        return Tape(near.device, shapes, self.first, self._names, done, given, collected, tensors, self._written)

    def run(self, tape: Tape, inputs: Inputs, net: nn.Module | None = None) -> Any:
        with doing(tape=tape), suppress(Stop):
            try:
                found = inputs.call(self.net if net is None else net)
                tape.expect_all()
                return found
            finally:  # also where the last of the blocks stops it
                for twin in vars(self).get("twins", ()):
                    twin.tell()
        return None

    def _expect_few(self, inputs: Inputs) -> list[Tensor | None]:
        tensors = inputs.tensors()
        if len(tensors) > len(self._goes):
            others = ", ".join(repr(name) for name in inputs.kwargs if name not in self._keywords)
            raise ValueError(
                f"the model is called with {others or f'{len(tensors)} tensors'}, and its pipe was made with a sample "
                f"{'without' if others else f'of {len(self._goes)}'}; make the pipe with a sample that has them all"
            )
        return [*tensors, *[None] * (len(self._goes) - len(tensors))]


@skippable()
class ModelBlock(Part):
    """One block of a model, the ``number``-th of all, at ``place`` in its trunk.

    If it is the ``last`` of its trunk, the next segment needs its whole result.
    """

    def __init__(
        self, net: nn.Module, path: str, calls: Calls, *, place: int, number: int, last: bool, namespace: Namespace
    ) -> None:
        super().__init__(net, path)
        self._place = place
        self._number = number
        self._call = calls.blocks[number]
        self._last = last
        self._is_used, self._written = number in calls.used, calls.written
        self._gives = calls.skips(lambda source, _: source.is_block and source.call == number)
        self.__dict__["stashable_names"] = frozenset(self._gives)
        Skippable.isolate(self, namespace)

    def forward(self, carried: dict[str, Any]) -> Generator[stash, None, dict[str, Any]]:
        """The input values that later blocks need, with the output of this block."""
        recipe = carried["recipe"].content[self._place]
        values = carried["values"]
        given = [values[leaf.name] if isinstance(leaf, Value) else leaf.value for leaf in recipe.leaves]
        args, kwargs = recipe.tree.value(given)
        first = self._number - self._place
        with collecting(carried["collected"].get(first, {})) as collected:
            found, tree = flattened(self.net(*args, **kwargs))
        if tree != self._call.result:
            raise RuntimeError(f"block {self.path!r} returned another structure than {WITH_SAMPLE}")
        self._expect_constants(found)
        for title, key in self._gives.items():
            tensor = found[key[2]] if key[2] >= 0 else given[-1 - key[2]]
            yield stash(title, tensor.clone() if key in self._written else tensor)
        if self._is_used:
            shapes = {output_name(self._number): (tuple(map(like, found)),)}
            carried = carried | {"shapes": carried["shapes"] | shapes}
        own = {output_name(self._number, m): leaf for m, leaf in enumerate(found) if isinstance(leaf, Tensor)}
        kept = {name: value for name, value in (values | own).items() if name in recipe.keep}
        every = {**carried["collected"], first: collected} if collected else carried["collected"]
        return carried | {"values": kept | own if self._last else kept, "collected": every}

    def expect_called_alike(self, carried: dict[str, Any]) -> None:
        """Raise RuntimeError unless the block is called with arguments as those that the model itself passes."""
        if carried["recipe"].content[self._place].tree != self._call.arguments:
            raise RuntimeError(
                f"block {self.path!r} is called with other arguments; does the forward look at the type of its blocks? "
                "Ask isinstance(), or for an attribute"
            )

    def _expect_constants(self, found: Sequence[Any]) -> None:
        """Raise RuntimeError unless what is no tensor is as with the sample: later segments compute with that."""
        for leaf, then in zip(found, self._call.outputs, strict=True):
            if not is_as_then(leaf, then):
                raise RuntimeError(
                    f"block {self.path!r} returned {_shown(leaf)}, and {_shown(then)} with the sample, with which "
                    "later parts of the model compute; let it return a tensor, or flatten the model with a sample that "
                    "it treats alike"
                )


def _shown(leaf: Any) -> str:
    return "a tensor" if isinstance(leaf, (Tensor, Like)) else repr(leaf)


def _skip(k: int, segment: int) -> str:
    return f"input {k} of segment {segment}"
