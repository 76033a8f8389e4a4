"""Run the blocks of one forward, and the operations between them, on the tensors of the current stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from microbatch import flatten
from streams import Context

from .._current import current
from ..checkpoint._attention import chosen_kernels, own_kernels
from ..checkpoint._parametrized import is_caching, own_cache
from ..engine._block import Block
from ..engine._spec import RunSpec
from ..values._leaves import Activation, Arguments, get_tensors, version
from ._between import Between
from ._buffers import AfterBlocks, Held
from ._called import answered_by
from ._collected import collector
from ._facts import READS, Facts, Place, find_place
from ._generators import Numbers, end_nothing
from ._grad import get_grad_inputs, through_blocks
from ._hooks import Hooks
from ._left import Left
from ._owners import Owned, Owners
from ._pick import Pick
from ._row_order import Entries
from ._tensors import Moves, Tensors
from ._tree import is_plain, map_tree
from ._used import Uses
from ._written import Written


class AnyRun(Moves, Protocol):
    """The part of a run that its forwards use.

    Attributes:
        model: the model.
        pick: selects the part of its output that is returned.
        blocks: its blocks.
        others: modules that are not blocks, but whose calls are intercepted in the same way.
        count: the number of its stages, in all processes.
        spec: the description of the run.
        replays: whether the output is computed for the full mini-batch, from the outputs of blocks.
        start: calls a function on a thread for forwards.
        left: the tensors that blocks have stored in attributes.
        owners: the forwards that computed tensors between blocks.
        numbers: the states of Python's and NumPy's generators.
        outside: the buffers of modules outside blocks.
    """

    model: nn.Module
    pick: Pick
    blocks: Collection[nn.Module]
    others: Container[nn.Module]
    count: int
    spec: RunSpec
    replays: bool
    start: Callable[[Callable[[], None]], Any]
    left: Left
    owners: Owners
    numbers: Numbers

    @property
    def outside(self) -> Sequence[Held]: ...

    def is_own(self, stage: int) -> bool:
        """Return whether ``stage`` is in this process."""

    def tensors(self, microbatch: int) -> Tensors:
        """Return the object that passes the tensors of the current stage to operations."""

    def answer(self, name: str, module: nn.Module, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the output of a block in a different process, on ``meta``."""

    def block(self, stage: int, microbatch: int, module: nn.Module) -> Block | None:
        """Return the object that recomputes ``module``, or None if this micro-batch is not checkpointed."""

    def expect_free(self, tensor: Tensor, stage: int, microbatch: int) -> None:
        """Expect that no other stage uses ``tensor``, which an operation of ``stage`` has modified in place."""

    def expect_drawing(self, generators: Sequence[str]) -> None:
        """Raise an error unless the model may use these ``generators`` of Python or NumPy between its blocks."""

    def tell_of_objects(self, module: nn.Module) -> None:
        """Log that ``module`` is not recomputed."""

    def tell_of_order(self, name: str, stage: int, later: int) -> None:
        """Log that a ``later`` stage computes a block of ``stage``."""

    def on_streams(self) -> AbstractContextManager[None]:
        """Return a context in which the streams of all stages are current."""


class Ended(BaseException):
    """Ends a forward early: after a failure elsewhere, or after the last block, if a replay computes the output."""


class Call(NamedTuple):
    """A call of a block by the model.

    Attributes:
        stage: the stage of the block.
        module, name: the block, and its name in the model.
        function: calls the block itself, including its hooks.
        place: the position of the call in the random numbers of the forward; None if the module is not a block.
    """

    stage: int
    module: nn.Module
    name: str
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    place: int | None


class Watched(NamedTuple):
    """The state of a call before its block runs.

    Attributes:
        given: the tensors among its arguments.
        args, kwargs: its arguments, as tensors of the current stage.
        written: compares the lists and dicts among its arguments before and after the call.
        left: a function of the output, which records the tensors that the block has stored in attributes.
        collected: the number of values that hooks had collected before the call, by kind.
    """

    given: Sequence[Tensor]
    args: Any
    kwargs: Any
    written: Written
    left: Callable[[Any], None]
    collected: Mapping[str, int]


class Calls:
    """The calls of blocks in one forward, and the operations between them.

    Args:
        run: the run that the forward belongs to.
        inputs: the arguments of the model, as leaves.
        known: facts from earlier forwards, which let this one end after its last block; None for a complete forward.
        enter: waits for the turn of a stage, which calls a block with these arguments.

    Attributes:
        tensors: passes the tensors of the current stage to operations.
        uses: the calls of blocks, and the uses of their outputs; None unless a replay computes the model's output.
        used: the outputs of blocks that the model itself uses, on the last stage; set at the end.
        orders: values that show the order of the rows in arguments of blocks; set at the end.
        drew: the names of the generators of Python and NumPy that the model has used before its last call of a block.
        numbers: the numbers that the model has read from tensors: see :class:`Facts`.
        between: the mode that intercepts operations between blocks.
        is_done: whether the remaining operations of the model have no effect.
        until: the stage in this process whose turn it is.
    """

    is_of_forward = True

    def __init__(
        self, run: AnyRun, microbatch: int, inputs: Activation, known: Facts | None, enter: Callable[[int, Any], None]
    ) -> None:
        self._run, self._microbatch, self._enter = run, microbatch, enter
        self.tensors = run.tensors(microbatch)
        self.uses = Uses(type(run.model).__name__, known, self.tensors) if run.replays else None
        self.used: dict[Place, Tensor] = {}
        self.orders: dict[Entries, Tensor] = {}
        self.drew, self.numbers = set[str](), dict[Any, set[Any]]()
        self.between = Between(self)
        self.is_done, self.until = False, 0
        # After a complete forward, a replay repeats the operations after its last block.
        self._after = AfterBlocks(run.outside) if run.replays and known is None and run.model.training else None
        self._owned = Owned(run.owners, microbatch, type(run.model).__name__, run.is_of_model)
        self._hooks = Hooks(run.model, run.blocks)
        self._number = 0  # the index of the next call
        self._kind = (*map(_kind, flatten(inputs.value)[0]),)
        self._end_piece: Callable[..., Sequence[str]] = end_nothing

    def clear(self) -> None:
        """Release all tensors."""
        self.used, self.orders = {}, {}
        self.uses = None  # it refers to the tensors
        self._owned.clear()
        self.tensors.clear()

    def end(self) -> None:
        """Break reference cycles after the forward."""
        del self.between, self._enter

    # The beginning and the end of the forward.

    def entering(self, inputs: Activation) -> Any:
        """Return the arguments of the model, for its ``inputs``."""
        tensors = [self.tensors.take_input(leaf) for leaf in inputs.tensors]
        if self.uses is not None:
            tensors = self.uses.record_inputs(tensors)
        self._owned.add(tensors, 0)
        return inputs.with_tensors(tensors).value

    def finish(self, output: Any) -> Any:
        """Return the ``output`` of the model as tensors of the last stage."""
        self._hooks.expect_kept()
        self.expect_more()
        self.leave_piece(is_repeated=self._run.replays)
        with self.between.off():
            self._enter(self._run.count - 1, ())
            output = map_tree(output, self.here)
            self._collect()
            if self._after is not None:
                self._after.restore()
        return output

    def expect_more(self) -> None:
        """End the forward again if the model has caught the exception that ended it."""
        if self.is_done:
            raise Ended

    def _collect(self) -> None:
        """Move the used outputs of blocks to the last stage, which returns them to the caller."""
        if self.uses is not None:
            self.used, self.orders = self.uses.collect(), self.uses.orders
        self.tensors.finish()

    # Generators of Python and NumPy.

    def begin_piece(self) -> None:
        """Begin the operations between two calls of blocks, which may use the generators of Python and NumPy."""
        at = current.work.rng.at
        owner = at, self._run.model.training, torch.is_grad_enabled()
        self._end_piece = self._run.numbers.begin(owner, self._kind, (self._microbatch, at), is_block=False)

    def leave_piece(self, *, is_repeated: bool = False) -> Sequence[str]:
        """End the operations before a call of a block. Return the names of the generators that they have used.

        Args:
            is_repeated: whether a replay runs these operations for the full mini-batch, and only that counts.
        """
        end, self._end_piece = self._end_piece, end_nothing
        if drew := end(counts=not is_repeated):
            self._run.expect_drawing(drew)
        return drew

    def _drawing(self, module: nn.Module, function: Any, at: int) -> Callable[..., Any]:
        """Return ``function``, which calls a block, with separate states of Python's and NumPy's generators."""
        numbers, place = self._run.numbers, (self._microbatch, at)

        def call(*args: Any, **kwargs: Any) -> Any:
            owner = module, module.training, torch.is_grad_enabled()
            end = numbers.begin(owner, (*map(_kind, args), *map(_kind, kwargs.values())), place, is_block=True)
            try:
                return function(*args, **kwargs)
            finally:
                end()

        return call

    # Blocks.

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a block through ``function``, in the turn of its stage."""
        self.expect_more()
        is_block = module not in self._run.others
        if not is_block and stage < self.tensors.stage:
            return function(*args, **kwargs)  # a later stage runs it, on copies of its parameters
        self.between.expect_no_checkpoint(is_block=True)
        self.drew.update(self.leave_piece())
        place = 2 * self._number + 1
        self._number += is_block
        function = self._drawing(module, function, place)
        call = Call(stage, module, name, function, args, kwargs, place if is_block else None)
        with self.between.off():
            watched = self._begin_call(call)
            is_here = stage == self.tensors.stage
            if is_here:
                output = self._call(call, watched)
        if not is_here:
            output = self._call_later(call)
        if self._run.offloads:
            with self.between.off():
                output = map_tree(output, self._run.own)
        if is_block:
            current.work.rng.at = place + 1
        self._end_call(call, watched, output)
        if self.uses is not None and self.uses.is_complete:
            self._complete()
        if self._after is not None:
            self._after.begin()
        self.begin_piece()
        return output

    def _begin_call(self, call: Call) -> Watched:
        """Wait for the turn of the block's stage, and record the state before the block runs."""
        name, module, arguments = call.name, call.module, (call.args, call.kwargs)
        if call.stage > self.tensors.stage:
            _expect_parameters(name, module)
        self._enter(call.stage, arguments)
        self._hooks.look(name, module)
        left = self._run.left.watch(name, module, self._microbatch, arguments, self._run.is_of_model)
        if call.place is not None:
            current.work.rng.at = call.place
        given = get_tensors(arguments)
        self._owned.begin()
        for tensor in given:
            self._owned.read(tensor, self.tensors.stage)
        is_here = call.stage == self.tensors.stage
        args, kwargs = self.tensors.arguments(*arguments) if is_here else arguments
        written = Written((call.args, [*call.kwargs.values()]), (args, [*kwargs.values()]))
        collected = {kind: len(values) for kind, values in collector().items() if isinstance(values, list)}
        return Watched(given, args, kwargs, written, left, collected)

    def _end_call(self, call: Call, watched: Watched, output: Any) -> None:
        """Record the effects of the block."""
        self._end_writing(call.name, watched.written)
        with self.between.off():
            watched.left(output)
            collected = {kind: collector()[kind][size:] for kind, size in watched.collected.items()}
            self.tensors.place_output(collected, (call.args, call.kwargs))
            self._owned.end_block(output, self.tensors.stage)
            if self.uses is not None:
                self.uses.record(call.name, output, collected, [tensor.shape for tensor in watched.given])

    def _end_writing(self, name: str, written: Written) -> None:
        """Copy the changes that a block has made to its list and dict arguments to the model's own lists and dicts."""
        if self.uses is None:
            written.end(lambda tensor: tensor)
        elif not written.end(partial(self.uses.writes, name)):
            raise RuntimeError(_WRITES.format(name))

    def _complete(self) -> None:
        """End the forward after its last block."""
        with self.between.off():
            self._enter(self._run.count - 1, ())
            self._collect()
        self.is_done = True
        raise Ended

    def _call(self, call: Call, watched: Watched) -> Any:
        """Call a block of this stage, and record which tensors of the model it modifies in place."""
        args, kwargs = watched.args, watched.kwargs
        own = get_tensors((args, kwargs)) if self.uses is not None else ()
        if self.uses is not None:
            self.uses.record_orders(own)
        before = [*map(version, own)]
        with answered_by(None):
            if self._run.is_own(self.tensors.stage):
                output = self._compute(call, args, kwargs)
            else:
                output = self._run.answer(call.name, call.module, call.function, args, kwargs)
            output = self.tensors.place_output(output, (args, kwargs))
        if self.uses is not None:
            for tensor, here, then in zip(watched.given, own, before, strict=True):
                if version(here) != then:
                    self.uses.alters(call.name, tensor)
        return output

    def _call_later(self, call: Call) -> Any:
        """Call a block of an earlier stage, whose turn is over.

        This stage runs it on copies of the parameters, which it receives for each operation.
        """
        self.tensors.expect_present(call.name, call.stage)
        self._run.tell_of_order(call.name, call.stage, self.tensors.stage)
        with answered_by(None):
            return call.function(*call.args, **call.kwargs)

    def _compute(self, call: Call, args: Any, kwargs: Any) -> Any:
        module, function = call.module, call.function
        block = None if call.place is None else self._run.block(self.tensors.stage, self._microbatch, module)
        at, kernels, caches = current.work.rng.at, chosen_kernels(), is_caching()

        def compute(value: Arguments) -> Any:
            current.work.rng.at = at
            with own_kernels(kernels), own_cache(caches):
                return function(*value.args, **value.kwargs)

        value = Arguments(tuple(args), dict(kwargs))
        if block is None or not torch.is_grad_enabled():
            return compute(value)
        if not is_plain(value):
            self._run.tell_of_objects(module)
            return compute(value)
        output, forward = block.forward(compute, value, self._context())
        self.tensors.turn.calls.append(forward)
        return output

    def _context(self) -> Context:
        """Return the context in which the model calls a block. The model may have entered autocast, for example."""
        context = Context.capture()
        # Use the caller's context variables. The model's own let hooks inside blocks collect values, which must not
        # happen again in a recomputation.
        context.variables = self._run.spec.context.variables
        return context

    # Operations between blocks.

    @property
    def device(self) -> torch.device:
        """The device of the stage in this process whose turn it is."""
        return self._run.places[self.until][0]

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one of the model's own operations on the tensors of this stage."""
        if self._after is not None:
            map_tree((args, kwargs), self._keep)
        if any(self.here(tensor) is not tensor for tensor in get_grad_inputs(function, args, kwargs)):
            raise through_blocks(type(self._run.model).__name__)
        self._owned.begin()
        output = self.tensors.compute(function, args, kwargs, self.here)
        if self.uses is not None and function in READS:
            number = output if isinstance(output, bool | int | float | complex) else None
            self.numbers.setdefault(find_place(), set()).add(number)
        for tensor in self._owned.find_altered():
            self._run.expect_free(tensor, self.tensors.stage, self._microbatch)
        self._owned.end(output, self.tensors.stage)
        return output if self._after is None else map_tree(output, self._after.note_result)

    def _keep(self, tensor: Tensor) -> Tensor:
        """Save the value of ``tensor`` if it is a buffer of the model, which the operation may modify."""
        is_buffer = not isinstance(tensor, nn.Parameter) and self._run.is_of_model(tensor)
        if self._after is not None and is_buffer and not tensor.requires_grad:
            self._after.keep(tensor)
        return tensor

    def here(self, tensor: Tensor) -> Tensor:
        """Return the tensor that represents ``tensor`` on this stage, and record that the model itself uses it."""
        self.read(tensor)
        found = self.tensors.here(tensor)
        if found is not tensor:
            self._owned.add_copy(found, tensor)
        return found

    def read(self, tensor: Tensor) -> None:
        """Record that the model itself uses ``tensor``, which may be the output of a block."""
        if self.uses is not None:
            self.uses.note(tensor)
        self._run.left.expect_not(tensor, self._run.model, self._microbatch)
        self._owned.read(tensor, self.tensors.stage)


def _expect_parameters(name: str, module: nn.Module) -> None:
    """Raise RuntimeError if a block of a later stage holds plain tensors instead of its parameters."""
    if not all(isinstance(each, nn.Parameter) for each in module.parameters()):
        raise RuntimeError(
            f"block {name!r} is called with different tensors instead of its parameters, for example by "
            "torch.func.functional_call; the next micro-batch would also use them; compute them inside the block, for "
            "example by a parametrization"
        )


def _kind(value: Any) -> Any:
    """Return the size of a tensor, a flag itself, and None for anything else."""
    return value.shape if isinstance(value, Tensor) else value if isinstance(value, bool) else None


_WRITES = (
    "block {!r} modifies a list, dict or dataclass that the model passes to it; the output of the full mini-batch, "
    "computed without calling blocks again, would miss the change; let the block return its additions, or pass "
    "out_spec= or a loss_fn that returns gpipe.LossSum(total, count)"
)
