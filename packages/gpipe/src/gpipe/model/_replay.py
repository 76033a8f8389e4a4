"""Run the forward of a model once more, for the full mini-batch, with the known outputs of its blocks.

A call of a block computes nothing, but returns the joined outputs of the block for micro-batches. So the result is
exactly the model's output for the full mini-batch, whether it is a loss of any kind, similarities between any two rows,
or an object of any class.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import unflatten
from streams import current_stream, wait_stream

from .._torch import next_sequence_number
from ..engine._autograd import attach
from ..engine._loss_value import LossFunction, LossValue
from ..engine._offloaded import Offload
from ..engine._whole_loss import WholeLoss
from ..values._leaves import Activation, as_arguments, as_nonleaf, detach_leaves, get_tensors
from ..values._sharing import get_marks, with_marks
from ._between import Between
from ._buffers import copy_dicts, copy_small_buffers, give_back, outside, restore
from ._called import answered_by
from ._collected import collector
from ._drawn import Draws
from ._elsewhere import Elsewhere
from ._facts import READS, Answer, Facts, Place, Shape, find_place
from ._grad import Leaves, get_grad_inputs, through_blocks
from ._moved import Moved, Places
from ._row_order import Entries, are_in_order, compute_numbers, get_numbered_dims
from ._rows import Argument, are_outputs_in_order, dim_between, dim_by, join_rows, size_of_whole
from ._tree import map_tree


def return_itself(value: Any) -> Any:
    return value


Sizes = Callable[[], Mapping[int, torch.Size]]
"""Returns the sizes of the tensors in the output of a call, by their number."""


class Replay:
    """One forward for the full mini-batch, in which calls of blocks return known outputs.

    Args:
        model: the model.
        blocks: its blocks.
        others: modules that are not blocks, but whose calls are handled in the same way.
        facts: the facts from the forwards of micro-batches, without tensors.
        used: one mapping per micro-batch: the outputs of blocks that the model itself uses, by place, and numbers
            that show the order of the rows in arguments, by their entries.
        counts: the number of rows per micro-batch, then the numbers for inputs with different rows, such as pictures.
        elsewhere: finds the sizes of outputs of blocks.
        devices: the device of each stage.
        get_owner: returns the original of a tensor that a stage holds as a copy during a run.
        offload: whether parameters are on the host, and in which dtype stages compute.
    """

    is_of_forward = True

    def __init__(
        self,
        model: nn.Module,
        blocks: Collection[nn.Module],
        others: Container[nn.Module],
        facts: Facts,
        used: Sequence[Mapping[str, Tensor]],
        counts: Sequence[Sequence[int]],
        elsewhere: Elsewhere,
        devices: Sequence[torch.device],
        get_owner: Callable[[Tensor], Tensor] = return_itself,
        *,
        offload: Offload = False,
    ) -> None:
        self._get_owner, self._moved = get_owner, Moved(Places(devices, offload))
        self._others = others
        self._model, self._answers, self._devices = model, facts.answers, devices
        self._counts, self._elsewhere = counts, elsewhere
        self._used: dict[Place | Entries, list[Tensor | None]] = {}
        for name in {name: None for each in used for name in each}:
            numbers = [*map(int, name.split())]
            key = Place(*numbers) if len(numbers) == len(Place._fields) else Entries(*numbers)
            self._used[key] = [each.get(name) for each in used]
        self._calls = self._stage = 0
        self._number = 0  # of the next node of the graph, after the last call
        self._leaves = Leaves()
        self._filled: dict[Place, Tensor] = {}
        self._placeholders: dict[int, tuple[Tensor, Argument]] = {}
        self._draws, self._numbers = Draws(facts.drew), facts.numbers
        around = outside(model, blocks) if model.training else []
        self._buffers = copy_small_buffers(buffer for module in around for buffer in module.buffers(recurse=False))
        self._held = copy_dicts(module._buffers for module in around)
        self._unjoined: RuntimeError | None = None  # for results that depend on an output of a block without values

    def output(self, inputs: Any, pick: Callable[[Any], Any] = return_itself) -> Any:
        """Return the output of the model for ``inputs``, or the part of it that ``pick`` returns.

        This result must not depend on random numbers drawn between blocks. Any other part of the output may.
        """
        arguments = as_arguments(inputs)
        begin = self._devices[0]
        args, kwargs = (map_tree(part, lambda tensor: tensor.to(begin)) for part in (arguments.args, arguments.kwargs))
        self._between = Between(self)
        try:
            with answered_by(self), self._draws.watched(), self._between:
                output = pick(self._model(*args, **kwargs))
                with self._between.off():
                    self._stage = len(self._devices) - 1
                    output = map_tree(output, self._return_tensor)
        finally:
            try:
                self._between.leave()  # again, in case an interrupt prevented it
            finally:
                self._between.leave()  # and another one
            del self._between  # it refers to this object
        if self._calls != len(self._answers):
            raise _other(self._model, self._calls, len(self._answers))
        return output

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the known output of a block."""
        is_next = self._calls < len(self._answers) and self._answers[self._calls].block == name
        if module in self._others and not is_next:
            return function(*args, **kwargs)
        self._between.expect_no_checkpoint(is_block=True)
        if self._calls == len(self._answers):
            raise _other(self._model, self._calls + 1, len(self._answers))
        answer: Answer = self._answers[self._calls]
        if answer.block != name:
            raise RuntimeError(
                f"{type(self._model).__name__} called {name!r} for the full mini-batch, but {answer.block!r} for a "
                f"micro-batch; {_SAME}"
            )
        with self._between.off():
            self._stage = max(self._stage, stage)
            given = get_tensors((args, kwargs))
            self._leaves.add(given)
            pairs = enumerate(zip(answer.arguments, given, strict=False))
            arguments = [self._argument(k, size, tensor) for k, (size, tensor) in pairs]
            of_call = partial(self._sizes, name, module, function, args, kwargs)
            leaves = [
                self._fill_place(Place(self._calls, k), leaf, arguments, of_call)
                if isinstance(leaf, Shape | Place)
                else leaf
                for k, leaf in enumerate(answer.leaves)
            ]
            output, collected = unflatten(leaves, answer.tree)
            for kind, values in collected.items():
                collector()[kind].extend(values)
        self._calls += 1
        self._number = next_sequence_number()
        if self._calls == len(self._answers):
            self._end_blocks()
        return output

    def _end_blocks(self) -> None:
        """Check generators and restore buffers after the last block, as each micro-batch has already run this part."""
        if source := self._draws.elsewhere():
            raise self._random(source)
        with self._between.off():
            give_back(self._held)
            restore(self._buffers)

    @property
    def device(self) -> torch.device:
        """The device of the current stage."""
        return self._devices[self._stage]

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute one of the model's own operations on the device of the current stage."""
        count, tensors = self._draws.count, list[Tensor]()
        if any(map(self._is_before_blocks, get_grad_inputs(function, args, kwargs))):
            raise through_blocks(type(self._model).__name__)

        def look(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return self.here(tensor)

        given = map_tree(args, look), map_tree(kwargs, look)
        if self._calls < len(self._answers):
            self._leaves.add(tensors)
        if any(tensor.is_meta for tensor in tensors):
            return self._without_data(function, *given)
        output = self.place_output(function(*given[0], **given[1]))
        if function in READS:
            self._read(function, output, tensors)
        is_drawn = self._draws.count > count and self._calls < len(self._answers)
        if is_drawn or any(tensor in self._draws for tensor in tensors):
            map_tree(output, lambda tensor: self._draws.add([tensor]) or tensor)  # type: ignore[func-returns-value]
        return output

    def _read(self, function: Any, value: Any, tensors: Sequence[Tensor]) -> None:
        """Expect that a ``value`` read from random ``tensors`` is the one that all micro-batches read there."""
        if not any(tensor in self._draws for tensor in tensors):
            return
        known = self._numbers.get(find_place(), frozenset())
        if known != {value if isinstance(value, bool | int | float | complex) else self}:
            raise self._random(f"torch, and reads them by {function.__name__}()")

    def _is_before_blocks(self, tensor: Tensor) -> bool:
        """Return whether the output of a block may depend on ``tensor``, which is not a parameter."""
        if tensor.grad_fn is None:
            return tensor in self._leaves
        return tensor.grad_fn._sequence_nr() < self._number

    def _without_data(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute an operation with parameters of another process, whose result only blocks may use."""
        try:
            output, changes = self._elsewhere.operation(function, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise self._of_others() from error
        if changes:
            raise self._of_others()
        return output

    def _of_others(self) -> RuntimeError:
        return self._unjoined or depends_on_others(self._model)

    def _is_in_order(self, number: int, dim: int, tensor: Tensor) -> bool | None:
        """Return whether an argument of this call has its entries in the order in which micro-batches have them."""
        for each in get_numbered_dims(tensor) if tensor not in self._draws else ():
            parts = self._used.pop(Entries(self._calls, number, each), None)
            if parts is None or (dim >= 0 and dim != each):  # without a dim, one micro-batch may have all entries
                continue
            numbers = [part for part in parts if part is not None]
            found = are_in_order(numbers, compute_numbers(tensor, each), tensor.dtype)
            if found is not None:
                return found
        return None

    def _is_placeholder(self, tensor: Tensor) -> bool:
        found = self._placeholders.get(id(tensor))
        return found is not None and found[0] is tensor

    def _argument(self, number: int, size: torch.Size, tensor: Tensor) -> Argument:
        if self._is_placeholder(tensor):
            return self._placeholders[id(tensor)][1]
        dim = dim_between(size, tensor.shape)
        return Argument(size, dim, self._is_in_order(number, dim, tensor))

    def _fill_place(self, place: Place, leaf: Shape | Place, arguments: Sequence[Argument], of_call: Sizes) -> Tensor:
        """Return the tensor for the full mini-batch, or a placeholder if the model does not use it."""
        if isinstance(leaf, Place):
            return self._filled[leaf]
        if place in self._used:
            found = self._join(self._used.pop(place), place, arguments, of_call)
        else:
            found = torch.zeros((), dtype=leaf.dtype).expand(leaf.size)
            argument = Argument(leaf.size, dim_by(arguments, leaf.size), are_outputs_in_order(arguments))
            self._placeholders[id(found)] = found, argument
        self._filled[place] = found
        return found

    def _sizes(self, name: str, module: nn.Module, function: Any, *given: Any) -> Mapping[int, torch.Size]:
        if any(map(self._is_placeholder, get_tensors(given))):
            return {}  # they have the sizes for a micro-batch
        with answered_by(None):
            return self._elsewhere.sizes(name, module, function, *given)

    def _join(
        self, parts: Sequence[Tensor | None], place: Place, arguments: Sequence[Argument], of_call: Sizes
    ) -> Tensor:
        tensors, block = [part for part in parts if part is not None], self._answers[place.call].block
        if len(tensors) < len(parts):
            raise RuntimeError(f"the model uses an output of block {block!r} for some micro-batches only; {_SAME}")
        found = tensors[0] if len(tensors) == 1 else join_rows(tensors, self._counts, arguments)
        if found is not None:
            return found
        size = size_of_whole([tensor.shape for tensor in tensors], arguments) or of_call().get(place.leaf)
        self._unjoined = RuntimeError(
            f"{type(self._model).__name__} calls block {block!r} with the rows of the full mini-batch in another order "
            f"than with those of micro-batches, as if it had sorted them, or joined two inputs; {_WITHOUT}"
            if are_outputs_in_order(arguments) is False
            else f"block {block!r} returned a tensor of shape {tuple(tensors[0].shape)} for {self._counts[0][0]} rows, "
            f"which the model uses itself, and it is not known where its rows are; {_WITHOUT}"
        )
        if size is None:
            raise self._unjoined
        # It may be that only blocks use it, or tensors computed from it. Their outputs are known.
        return torch.empty(size, dtype=tensors[0].dtype, device="meta")

    def here(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the device of the current stage."""
        self.read(tensor)
        # A tied parameter is a single leaf here, whichever module holds it.
        tensor = self._get_owner(tensor) if tensor.is_leaf else tensor
        return self._moved.here(tensor, self.device)

    def place_output(self, output: Any) -> Any:
        """Move the output of an operation to the current stage's device. The operation may have set a different one."""
        return (
            map_tree(output, lambda tensor: self._moved.place(tensor, self.device)) if self._moved.is_needed else output
        )

    def _return_tensor(self, tensor: Tensor) -> Tensor:
        if tensor in self._draws:
            raise self._random("torch")
        if tensor.is_meta and self._unjoined is not None:
            raise self._unjoined
        return self.here(tensor)

    def _random(self, source: str) -> RuntimeError:
        return RuntimeError(
            f"between its blocks {type(self._model).__name__} draws random numbers ({source}), on which its output may "
            "depend; the output of the full mini-batch would use different ones than the blocks did; draw them in a "
            "block, or give step() a loss_fn whose losses of micro-batches are known to add up: reduction="
        )

    def read(self, tensor: Tensor) -> None:
        if self._is_placeholder(tensor):
            raise RuntimeError(
                f"{type(self._model).__name__} uses an output of a block for the full mini-batch that it did not use "
                f"for a micro-batch; {_SAME}"
            )


def depends_on_others(model: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"the loss of {type(model).__name__} for the full mini-batch depends on parameters of another rank, which the "
        "model uses between its blocks; name the module with these parameters as a block of the last stage, by "
        "blocks=, or give a loss_fn whose losses of micro-batches are known to add up: reduction="
    )


_WITHOUT = (
    "select by pick= what does not depend on it, or give out_spec=, or a loss_fn that returns "
    "gpipe.LossSum(total, count)"
)
_SAME = "its forward must call the same blocks, in the same order, whatever the rows are"


def _other(model: nn.Module, calls: int, known: int) -> RuntimeError:
    return RuntimeError(
        f"{type(model).__name__} called {calls} blocks for the full mini-batch, but {known} for a micro-batch; {_SAME}"
    )


def order_backward(output: Any, devices: Collection[torch.device]) -> Any:
    """Return ``output`` behind a node, whose backward makes the streams of this call wait for the caller's streams.

    Autograd lets only the device of the output wait. But on a different device the caller may just have zeroed the
    gradient of a parameter that the model itself uses there.
    """
    used = {device: current_stream(device) for device in devices if device.type != "cpu"}
    if not used or len(devices) == 1 or not torch.is_grad_enabled():
        return output

    def backward(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        for device, stream in used.items():
            wait_stream(stream, current_stream(device))
        return gradients

    found = {id(tensor): tensor for tensor in Activation(output).tensors if tensor.requires_grad}
    fresh = dict(zip(found, attach(backward, [*found.values()], [*found.values()]), strict=True))
    return map_tree(output, lambda tensor: fresh.get(id(tensor), tensor))


class ReplayedLoss(WholeLoss):
    """The loss of the full mini-batch, on the output that a replay computes from the outputs of blocks.

    Args:
        loss_fn: is called with the used outputs of blocks, the arguments of the model, a function that returns the
            owner of a tied parameter, and ``arguments``.
        inputs: the arguments of the model for the full mini-batch.
        learn: returns the convention of losses of this kind, if they follow one.

    Attributes:
        outputs: the output for the full mini-batch, as the only entry, if it is kept.
    """

    replays = True

    def __init__(
        self,
        loss_fn: LossFunction,
        inputs: Any,
        arguments: tuple[Any, ...],
        join: Callable[[Sequence[Activation]], Activation],
        *,
        weight: float,
        unlike: Callable[[LossValue], ValueError] | None,
        learn: Callable[[], Any],
    ) -> None:
        super().__init__(loss_fn, arguments, join, weight=weight, unlike=unlike)
        self._inputs, self.finding = inputs, learn  # type: ignore[method-assign]

    def _value(self, i: int, outputs: Activation, arguments: Sequence[Any]) -> LossValue:
        return super()._value(i, outputs, (self._entering(), self._tied.get_owner, *arguments))

    def _entering(self) -> Any:
        """Return the inputs as leaves. For the caller's graph, their gradients are added to the stages' gradients."""
        inputs = Activation(self._inputs)
        leaves = detach_leaves(inputs)
        for leaf, tensor in zip(leaves.tensors, inputs.tensors, strict=True):
            if leaf.requires_grad:
                self._tied.give(leaf, tensor)
        return as_nonleaf(leaves).value


def get_used_tensors(outputs: Sequence[Activation]) -> Activation:
    """Return the used tensors of each micro-batch. Each of ``outputs`` pairs the model's output, or None, with them."""
    used = [each.value[1] for each in outputs]
    found = Activation(used)
    if len(outputs) > 1:
        return found
    return with_marks(found, get_marks(outputs[0])[-len(found.tensors) :] if found.tensors else [])
