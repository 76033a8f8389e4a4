"""Run the forward of a model for one micro-batch on its own thread, which the stages resume in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Generator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import Semaphore
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from streams import Context, limit_threads, use_device

from .._current import Work, current
from .._torch import dispatch_modes, set_intercepting, with_dispatch_modes
from ..checkpoint._attention import chosen_kernels, own_kernels
from ..checkpoint._parametrized import is_caching, own_cache
from ..engine._block import Block
from ..engine._cores import Cores, bind, usable
from ..engine._exclusive import Sections, sections_of_thread, serving
from ..engine._spec import RunSpec
from ..values._leaves import Activation, Arguments, as_arguments, tensors_of, version
from ._between import Between
from ._buffers import AfterBlocks, Held
from ._called import answered_by
from ._collected import collector
from ._facts import Facts, Place
from ._generators import Numbers
from ._grad import differentiated, through_blocks
from ._hooks import Hooks
from ._left import Left
from ._pick import Pick
from ._row_order import Entries
from ._tensors import Moves, Tensors, Turn
from ._tree import changed, is_plain
from ._used import Uses
from ._written import Written


class AnyRun(Moves, Protocol):
    """The part of a run that its forwards use.

    Attributes:
        model: the model.
        pick: selects the part of its output that is returned.
        blocks: its blocks.
        others: modules that are not blocks, but whose calls are handled in the same way.
        count: the number of its stages, in all processes.
        spec: the description of the run.
        replays: whether the output is computed for the full mini-batch, from the outputs of blocks.
        start: calls a function on a thread for forwards.
        left: the tensors that blocks have left in attributes.
        numbers: the random numbers of Python and NumPy.
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
    numbers: Numbers

    @property
    def outside(self) -> Sequence[Held]: ...

    def is_own(self, stage: int) -> bool:
        """Return whether ``stage`` is in this process."""

    def tensors(self, microbatch: int) -> Tensors:
        """Return the object that gives operations the tensors of the current stage."""

    def answer(self, name: str, module: nn.Module, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the output of a block of another process, on ``meta``."""

    def block(self, stage: int, microbatch: int, module: nn.Module) -> Block | None:
        """Return the object that recomputes ``module``, or None if this micro-batch is not checkpointed."""

    def expect_drawing(self, generators: Sequence[str]) -> None:
        """Expect that the model may draw from these ``generators`` of Python or NumPy between its blocks."""

    def tell_of_objects(self, module: nn.Module) -> None:
        """Log that ``module`` is not recomputed."""

    def tell_of_order(self, name: str, stage: int, later: int) -> None:
        """Log that a ``later`` stage computes a block of ``stage``."""

    def on_streams(self) -> AbstractContextManager[None]:
        """Return a context in which the streams of all stages are current."""


class Ended(BaseException):
    """Ends a forward early: after a failure elsewhere, or after the last block, if a replay computes the output."""


class Forward:
    """One call of the model, for the rows of a micro-batch.

    Args:
        run: the run that it belongs to.
        inputs: the arguments of the model, as leaves.
        known: the facts from earlier forwards, if this one can end after its last block; None for a complete one.

    Attributes:
        uses: the calls of blocks, and the uses of their outputs; None unless a replay computes the model's output.
        used: the outputs of blocks that the model itself uses, on the last stage; known at the end.
        orders: numbers that show the order of the rows in arguments of blocks; known at the end.
    """

    def __init__(self, run: AnyRun, microbatch: int, inputs: Activation, known: Facts | None) -> None:
        self._run, self._inputs = run, inputs
        self.microbatch = microbatch
        self._tensors = run.tensors(microbatch)
        self.uses = Uses(type(run.model).__name__, known, self._tensors) if run.replays else None
        # If the forward is complete, a replay will repeat the operations after its last block.
        self._after = AfterBlocks(run.outside) if run.replays and known is None and run.model.training else None
        self._output: Any = None
        self.used: dict[Place, Tensor] = {}
        self.orders: dict[Entries, Tensor] = {}
        self._calls = 0
        self._until = 0  # the stage whose turn it is
        self._sizes = *map(_size, inputs.tensors), run.model.training
        self._end_piece: Callable[[], Sequence[str]] = _nothing
        self._between = Between(self)
        self._hooks = Hooks(run.model, run.blocks)
        self._go, self._stopped = Semaphore(0), Semaphore(0)
        self._is_on = self._is_over = self._is_abandoned = False
        self._is_done = False  # nothing that the model does from here on matters
        self._error: BaseException | None = None
        self._work = current.work
        self._modes: list[Any] = []
        self._sections: Sections = ()
        self._threads, self._cores = 1, Cores()

    # Called by workers.

    @property
    def turns(self) -> list[Turn]:
        """The turn of each stage."""
        return self._tensors.turns

    def go_on(self, stage: int) -> Turn:
        """Resume the forward until it calls a block of a later stage of this process, or ends.

        Returns:
            The turn of ``stage``.
        """
        self._until = stage
        if not self._is_over:
            self._work, self._modes = current.work, dispatch_modes()
            self._cores = usable()
            if not self._is_on:
                self._is_on, self._sections, self._threads = True, sections_of_thread(), torch.get_num_threads()
                self._run.start(self._compute)
            self._go.release()
            self._stopped.acquire()
            self._work, self._modes = Work({}), []
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # avoids a reference cycle: its traceback refers to this frame
        return self._tensors.turns[stage]

    def take(self) -> tuple[Any, dict[Place | Entries, Tensor]]:
        """Return the output, or None if the forward ended early, and the tensors on the last stage that a replay needs.

        The thread may keep this object alive a little longer, but no graph.
        """
        output, found = self._output, dict[Place | Entries, Tensor]([*self.used.items(), *self.orders.items()])
        self._forget()
        return output, found

    def abandon(self) -> None:
        """End the forward where it has stopped. Afterwards, nothing refers to its thread."""
        if self._is_on and not self._is_over:
            self._is_abandoned = True
            self._go.release()
            self._stopped.acquire()
            while not self._is_over:  # the model caught the exception and continued
                self._go.release()
                self._stopped.acquire()
        self._forget()

    def _forget(self) -> None:
        self._output, self.used, self.orders = None, {}, {}
        self.uses = None  # it refers to the tensors
        self._tensors.clear()

    # Called on the forward's own thread.

    def _compute(self) -> None:
        self._go.acquire()
        try:
            if torch.get_num_threads() != self._threads:
                limit_threads(self._threads)
            set_intercepting(True)
            context = self._run.spec.context
            backwards_stay = torch.autograd.set_multithreading_enabled(False)
            # The cache last, because the context says whether there is one.
            with (
                context.applied(),
                serving(self._sections),
                backwards_stay,
                self._run.on_streams(),
                own_cache(is_caching()),
            ):
                self._turns()
        except Ended:
            pass
        except BaseException as error:
            if not self._is_done:
                self._error = error
        finally:
            set_intercepting(False)
            current.work = Work({})
            del self._between  # it refers to this object
            self._is_over = True
            self._stopped.release()

    def _turns(self) -> None:
        settings = self._settings()
        next(settings)
        self._turn = settings
        try:
            current.work.rng.at = 0
            arguments = as_arguments(self._entering(self._inputs))
            del self._inputs
            with answered_by(self), self._between:
                self._begin_piece()
                output = self._run.pick(self._run.model(*arguments.args, **arguments.kwargs))
                self._hooks.expect_kept()
                self._expect_more()
                self._leave_piece()
                with self._between.off():
                    self._enter(self._run.count - 1)
                    self._output = changed(output, self.here)
                    self._collect()
                    if self._after is not None:
                        self._after.restore()
        finally:
            self._leave_piece()
            self._turn.close()
            del self._turn

    def _entering(self, inputs: Activation) -> Any:
        tensors = [self._tensors.given(leaf) for leaf in inputs.tensors]
        if self.uses is not None:
            tensors = self.uses.inputs_of(tensors)
        return inputs.with_tensors(tensors).value

    def _settings(self) -> Generator[None]:
        """Apply the settings of a turn until the generator is closed."""
        current.work = self._work
        bind(self._cores)  # the worker, which waits, shares its cores
        with use_device(self._run.places[self._until][0]), with_dispatch_modes(self._modes):
            yield

    def _enter(self, stage: int, arguments: Any = ()) -> None:
        """Wait for the turn of ``stage``, which calls a block with ``arguments``."""
        while self._tensors.stage < stage:
            self._tensors.end(stage, arguments)
            arguments = ()
            if self._run.is_own(self._tensors.stage + 1):
                self._wait()
            self._tensors.begin()

    def _wait(self) -> None:
        """Stop until a worker begins the turn of the next stage, unless it has begun that one."""
        if self._tensors.stage + 1 <= self._until:
            return
        self._turn.close()
        at = current.work.rng.at
        self._stopped.release()
        self._go.acquire()
        if self._is_abandoned:
            self._turn = _no_settings()
            raise Ended
        self._turn = self._settings()
        next(self._turn)
        current.work.rng.at = at

    def _collect(self) -> None:
        """Move the used outputs of blocks to the last stage, which returns them to the caller."""
        if self.uses is not None:
            self.used, self.orders = self.uses.collected(), self.uses.orders
        self._tensors.finish()

    # Blocks.

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a block through ``function``, in the turn of its stage."""
        self._expect_more()
        is_block = module not in self._run.others
        if not is_block and stage < self._tensors.stage:
            return function(*args, **kwargs)  # a later stage computes it, with parameters that it receives
        self._between.expect_no_checkpoint(is_block=True)
        self._leave_piece()
        number = self._calls
        self._calls += is_block
        function = self._drawing(module, function, 2 * number + 1)
        before = {kind: len(values) for kind, values in collector().items() if isinstance(values, list)}
        with self._between.off():
            if stage > self._tensors.stage:
                _expect_parameters(name, module)
            self._enter(stage, (args, kwargs))
            self._hooks.look(name, module)
            look = self._run.left.watch(name, module, self.microbatch, (args, kwargs), self._run.is_of_model)
            if is_block:
                current.work.rng.at = 2 * number + 1
            given = () if self.uses is None else tensors_of((args, kwargs))
            is_here = stage == self._tensors.stage
            own = self._tensors.arguments(args, kwargs) if is_here else (args, kwargs)
            written = Written((args, [*kwargs.values()]), (own[0], [*own[1].values()]))
            if is_here:
                output = self._called(name, module, function, *own, given)
        if stage < self._tensors.stage:
            # The turn of its stage is over. This stage computes it with copies of the parameters, per operation.
            self._tensors.expect_present(name, stage)
            self._run.tell_of_order(name, stage, self._tensors.stage)
            with answered_by(None):
                output = function(*args, **kwargs)
        if is_block:
            current.work.rng.at = 2 * number + 2
        self._end_writing(name, written)
        with self._between.off():
            look(output)
            collected = {kind: collector()[kind][size:] for kind, size in before.items()}
            self._tensors.made(collected, (args, kwargs))
            if self.uses is not None:
                self.uses.record(name, output, collected, [tensor.shape for tensor in given])
        if self.uses is not None and self.uses.is_complete:
            with self._between.off():
                self._enter(self._run.count - 1)
                self._collect()
            self._is_done = True
            raise Ended
        if self._after is not None:
            self._after.begin()
        self._begin_piece()
        return output

    def _expect_more(self) -> None:
        """End the forward again if the model has caught the exception that ended it, and continued."""
        if self._is_done:
            raise Ended

    def _end_writing(self, name: str, written: Written) -> None:
        """Copy the changes that a block has made to its list and dict arguments to the model's own lists and dicts."""
        if self.uses is None:
            written.end(lambda tensor: tensor)
        elif not written.end(partial(self.uses.writes, name)):
            raise RuntimeError(_WRITES.format(name))

    def _begin_piece(self) -> None:
        """Begin the part between two calls of blocks, which may use the generators of Python and NumPy."""
        at = current.work.rng.at
        self._end_piece = self._run.numbers.begin((at, self._sizes), (self.microbatch, at))

    def _leave_piece(self) -> None:
        end, self._end_piece = self._end_piece, _nothing
        if drew := end():
            self._run.expect_drawing(drew)

    def _drawing(self, module: nn.Module, function: Any, at: int) -> Callable[..., Any]:
        """Return ``function``, which calls a block, with separate random numbers of Python and NumPy."""
        numbers, place = self._run.numbers, (self.microbatch, at)

        def call(*args: Any, **kwargs: Any) -> Any:
            sizes = *map(_size, args), *map(_size, kwargs.values())
            end = numbers.begin((module, module.training, sizes), place)
            try:
                return function(*args, **kwargs)
            finally:
                end()

        return call

    def _called(
        self, name: str, module: nn.Module, function: Any, args: Any, kwargs: Any, given: Sequence[Tensor]
    ) -> Any:
        """Call a block of this stage, and note which of the ``given`` tensors of the model it modifies in place."""
        own = tensors_of((args, kwargs)) if given else ()
        if self.uses is not None:
            self.uses.called_with(own)
        before = [*map(version, own)]
        with answered_by(None):
            if self._run.is_own(self._tensors.stage):
                output = self._computed(module, function, args, kwargs)
            else:
                output = self._run.answer(name, module, function, args, kwargs)
            output = self._tensors.made(output, (args, kwargs))
        for tensor, here, then in zip(given, own, before, strict=True):
            if self.uses is not None and version(here) != then:
                self.uses.alters(name, tensor)
        return output

    def _computed(self, module: nn.Module, function: Any, args: Any, kwargs: Any) -> Any:
        is_block = module not in self._run.others
        block = self._run.block(self._tensors.stage, self.microbatch, module) if is_block else None
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
        self._tensors.turn.calls.append(forward)
        return output

    def _context(self) -> Context:
        """Return the settings in which the model calls a block. Its forward may have entered autocast, for example."""
        context = Context.capture()
        context.function_modes = tuple(mode for mode in context.function_modes if mode is not self._between)
        # Use the caller's context variables. With its own, a model collects values in hooks inside its blocks, which
        # must not happen again in a recomputation.
        context.variables = self._run.spec.context.variables
        return context

    # Operations between blocks.

    @property
    def device(self) -> torch.device:
        """The device of the stage in this process whose turn it is."""
        return self._run.places[self._until][0]

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute one of the model's own operations with the tensors of this stage."""
        if self._after is not None:
            changed((args, kwargs), self._keep)
        if any(self.here(tensor) is not tensor for tensor in differentiated(function, args, kwargs)):
            raise through_blocks(type(self._run.model).__name__)
        output = self._tensors.compute(function, args, kwargs, self.here)
        return output if self._after is None else changed(output, self._after.made)

    def _keep(self, tensor: Tensor) -> Tensor:
        """Keep the value of ``tensor`` if it is a buffer of the model, which the operation may change."""
        is_buffer = not isinstance(tensor, nn.Parameter) and self._run.is_of_model(tensor)
        if self._after is not None and is_buffer and not tensor.requires_grad:
            self._after.keep(tensor)
        return tensor

    def here(self, tensor: Tensor) -> Tensor:
        """Return the tensor that stands for ``tensor`` on this stage, and note that the model itself uses it."""
        self.read(tensor)
        return self._tensors.here(tensor)

    def read(self, tensor: Tensor) -> None:
        """Note that the model itself uses ``tensor``, which a block may have returned."""
        if self.uses is not None:
            self.uses.note(tensor)
        self._run.left.expect_not(tensor, self._run.model, self.microbatch)


def _expect_parameters(name: str, module: nn.Module) -> None:
    """Raise RuntimeError if a block of a later stage holds plain tensors instead of its parameters."""
    if not all(isinstance(each, nn.Parameter) for each in module.parameters()):
        raise RuntimeError(
            f"block {name!r} is called with other tensors in place of its parameters, as by "
            "torch.func.functional_call, which would be those of the next micro-batch too; let the block itself "
            "compute with them, for example by a parametrization"
        )


def _no_settings() -> Generator[None]:
    return
    yield


def _nothing() -> Sequence[str]:
    return ()


def _size(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


_WRITES = (
    "block {!r} changes a list or dict that the model passes to it; the output of the full mini-batch, computed "
    "without calling blocks again, would miss the change; let the block return what it adds, or give out_spec= or a "
    "loss_fn that returns gpipe.LossSum(total, count)"
)
