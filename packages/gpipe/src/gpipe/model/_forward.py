"""The forward of a model for one micro-batch, in a thread of its own: stages let it go on in turn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import Semaphore
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from streams import AbstractEvent, Context, limit_threads, record_event, use_device

from .._current import Work, current
from .._flatten._collected import collector
from .._torch import next_sequence_number, set_intercepting
from ..checkpoint._state import last_entry
from ..engine._block import Block, BlockForward
from ..engine._cores import Cores, bind, usable
from ..engine._exclusive import Sections, sections_of_thread, serving
from ..engine._spec import RunSpec
from ..engine._stage import Stage
from ..transport._copy import StagePlace
from ..values._leaves import Activation, Arguments, AsNonleaf, as_arguments, version
from ._between import Between
from ._called import answered_by
from ._facts import Facts, Place, tensors_in
from ._tree import changed, is_plain
from ._used import Uses


class AnyRun(Protocol):
    """What a forward needs of the run that it is a part of.

    Attributes:
        model: the model.
        stages: its stages.
        places: the device, stream and copy streams of each stage.
        devices: the devices of the stages.
        copies: whether there are several.
        spec: the description of the run.
        replays: whether the output is computed for all rows, from what blocks have returned.
        start: calls a function in a thread of a forward.
        leaves: whether a block leaves tensors in attributes, as far as its calls have shown.
        left: these tensors, by identity, with the names of the attributes.
    """

    model: nn.Module
    stages: Sequence[Stage]
    places: Mapping[int, StagePlace]
    devices: set[torch.device]
    copies: bool
    spec: RunSpec
    replays: bool
    start: Callable[[Callable[[], None]], Any]
    leaves: dict[nn.Module, bool]
    left: dict[int, tuple[ref[Tensor], str]]

    def block(self, stage: int, microbatch: int, module: nn.Module) -> Block | None:
        """Return what recomputes ``module`` if this micro-batch is checkpointed, else None."""

    def tell_of_objects(self, module: nn.Module) -> None:
        """Log that ``module`` is not recomputed."""

    def tell_of_order(self, name: str, stage: int, later: int) -> None:
        """Log that a ``later`` stage computes a block of ``stage``."""

    def is_of_model(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a parameter or buffer of the model."""

    def parameter(self, tensor: Tensor, stage: int) -> Tensor:
        """Return a parameter or buffer of the model for an operation of ``stage``."""

    def on_streams(self) -> AbstractContextManager[None]:
        """Return a context in which the streams of all stages are current."""

    def sent(self, tensor: Tensor, source: int, target: int, done: AbstractEvent | None) -> Callable[[], Tensor]:
        """Send ``tensor`` to ``target``; return what receives it there, as a leaf."""


class Leaf(NamedTuple):
    """A tensor of an earlier stage, as a later stage uses it.

    Attributes:
        tensor: the tensor of the earlier stage.
        home: the stage that computed it.
        leaf: where the graph of the later stage begins.
        alias: what the model computes with; the leaf itself may not be changed in place.
        version: of ``alias``, when it was made.
    """

    tensor: Tensor
    home: int
    leaf: Tensor
    alias: Tensor
    version: int


class Copied(NamedTuple):
    """A tensor without gradient, as a later stage on another device uses it.

    Attributes:
        tensor: the tensor of the earlier stage.
        version: of ``tensor``, when it was copied.
        copy: what the model computes with.
        own: the version of ``copy``, when it was made.
        stage: the later stage.
    """

    tensor: Tensor
    version: int
    copy: Tensor
    own: int
    stage: int


class Part:
    """The part of a forward that one stage computes.

    Attributes:
        leaves: the tensors of earlier stages that it uses, by the identity of these.
        sent: its own tensors that later stages use, by identity.
        gradients: what arrives from later stages: functions that return gradients of what was ``sent``.
        calls: the calls of blocks that are recomputed.
        first: the number of the first node of its graph.
        done: follows all that the stage has queued on its device.
    """

    __slots__ = ("calls", "done", "first", "gradients", "leaves", "sent")

    def __init__(self) -> None:
        self.leaves: dict[int, Leaf] = {}
        self.sent: dict[int, Tensor] = {}
        self.gradients: dict[int, list[Callable[[], Tensor]]] = {}
        self.calls: list[BlockForward] = []
        self.done: AbstractEvent | None = None
        self.first = 0


class Ended(BaseException):
    """Ends a forward: a failure elsewhere, or the last block has been called and the rest is for all rows."""


class Forward:
    """One call of the model, for the rows of a micro-batch.

    Args:
        run: the run that it is a part of.
        inputs: the arguments of the model, as leaves.
        known: what earlier forwards have shown, if this one is to end after its last block; None for a complete one.

    Attributes:
        stage: the stage whose turn it is, or was last.
        parts: the part of each stage.
        output: what the model has returned, with the tensors that the last stage holds; None unless it is complete.
        used: the outputs of blocks that the model uses itself.
        uses: the calls of blocks, and the uses of what they returned; None unless the output is for all rows.
    """

    def __init__(self, run: AnyRun, microbatch: int, inputs: Activation, known: Facts | None) -> None:
        self._run, self._inputs = run, inputs
        self.microbatch = microbatch
        self.stage = -1
        self.parts = [Part() for _ in run.stages]
        self.output: Any = None
        self.used: dict[Place, Tensor] = {}
        self.uses = Uses(type(run.model).__name__, known, self._here) if run.replays else None
        self._calls = 0
        self.is_complete = False
        self._copies: dict[int, Copied] = {}  # the latest of each tensor
        self._ahead: dict[int, Callable[[], Tensor]] = {}  # what is on its way to the next block
        self._between = Between(self)
        self._limits: list[int] = []  # for each stage that it has left, the number of the next node of the graph
        self._go, self._stopped = Semaphore(0), Semaphore(0)
        self._is_on = self._is_over = self._is_abandoned = False
        self._error: BaseException | None = None
        self._work = current.work
        self._sections: Sections = ()
        self._threads, self._cores = 1, Cores()

    # The side of the workers.

    def go_on(self) -> Part:
        """Let the forward go on until it calls a block of a later stage, or ends."""
        self.stage += 1
        if not self._is_over:
            self._work = current.work
            self._cores = usable()
            if not self._is_on:
                self._is_on, self._sections, self._threads = True, sections_of_thread(), torch.get_num_threads()
                self._run.start(self._compute)
            self._go.release()
            self._stopped.acquire()
            self._work = Work({})
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # avoids a reference cycle: its traceback refers to this frame
        return self.parts[self.stage]

    def take(self) -> tuple[Any, dict[Place, Tensor]]:
        """Return output and used tensors, at the end. The thread may hold this object a moment longer, but no graph."""
        found = self.output, self.used
        self._forget()
        return found

    def _forget(self) -> None:
        self.output, self.used, self.parts = None, {}, []
        self.uses = None  # which refers to this object
        self._copies.clear()

    def abandon(self) -> None:
        """End the forward where it has stopped. Nothing refers to its thread then."""
        if self._is_on and not self._is_over:
            self._is_abandoned = True
            self._go.release()
            self._stopped.acquire()
            while not self._is_over:  # the model has caught the exception, and gone on
                self._go.release()
                self._stopped.acquire()
        self._forget()

    # The side of the forward: its own thread.

    def _compute(self) -> None:
        self._go.acquire()
        try:
            if torch.get_num_threads() != self._threads:
                limit_threads(self._threads)
            set_intercepting(True)
            context = self._run.spec.context
            backwards_stay = torch.autograd.set_multithreading_enabled(False)
            with context.applied(), serving(self._sections), backwards_stay, self._run.on_streams():
                self._turns()
        except Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            set_intercepting(False)
            current.work = Work({})
            del self._between  # which refers to this object
            self._is_over = True
            self._stopped.release()

    def _turns(self) -> None:
        turn = self._turn()
        next(turn)
        self._change = turn
        try:
            current.work.rng.at = 0
            arguments = as_arguments(self._nonleaf(self._inputs))
            del self._inputs
            with answered_by(self), self._between:
                output = self._run.model(*arguments.args, **arguments.kwargs)
                with self._between.off():
                    self._enter(self._run.stages[-1].index)
                    self.output = changed(output, self.here)
                    self._collect()
            self.is_complete = True
        finally:
            self._change.close()
            del self._change

    def _nonleaf(self, inputs: Activation) -> Any:
        tensors = [self._alias(leaf) for leaf in inputs.tensors]
        if self.uses is not None:
            tensors = self.uses.inputs_of(tensors)
        return inputs.with_tensors(tensors).value

    def _turn(self) -> Generator[None]:
        """The settings of a turn, until the generator is closed."""
        current.work = self._work
        bind(self._cores)  # those of the worker, which waits on them
        with use_device(self._run.places[self.stage][0]):
            yield

    def _enter(self, stage: int, arguments: Any = ()) -> None:
        """Stop until it is the turn of ``stage``, which calls a block with ``arguments``."""
        while self.stage < stage:
            self._limits.append(next_sequence_number())
            stream = self._run.places[self.stage][1]
            self.parts[self.stage].done = record_event(stream) if self._run.copies else None
            if self._run.copies:
                changed(arguments, partial(self._send_ahead, stage))
            arguments = ()
            self._change.close()
            at = current.work.rng.at
            self._stopped.release()
            self._go.acquire()
            if self._is_abandoned:
                self._change = _nothing()
                raise Ended
            self._change = self._turn()
            next(self._change)
            self.parts[self.stage].first = next_sequence_number()
            current.work.rng.at = at

    def _send_ahead(self, stage: int, tensor: Tensor) -> Tensor:
        """Send a tensor of this stage to ``stage``, before the worker of that one has time for it."""
        (here, *_), (there, *_) = self._run.places[self.stage], self._run.places[stage]
        if tensor.requires_grad:
            is_own = tensor.grad_fn is not None and self._home(tensor.grad_fn) == self.stage
        else:
            is_own = id(tensor) not in self._copies and not self._run.is_of_model(tensor)
        if is_own and tensor.device == here != there and id(tensor) not in self._ahead:
            self._ahead[id(tensor)] = self._run.sent(tensor, self.stage, stage, self.parts[self.stage].done)
        return tensor

    def _received(self, tensor: Tensor, home: int) -> Tensor:
        sent = self._ahead.pop(id(tensor), None)
        return (sent or self._run.sent(tensor, home, self.stage, self.parts[home].done))()

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Call a block by ``function``, in the turn of its stage."""
        number = self._calls
        self._calls += 1
        # What a block leaves in attributes belongs to the micro-batch that has left it last.
        watched, known = (module if self._run.leaves.get(module, True) else None), set[int]()
        before = {kind: len(values) for kind, values in collector().items() if isinstance(values, list)}
        with self._between.off():
            self._enter(stage, (args, kwargs))
            current.work.rng.at = 2 * number + 1
            known |= _tensors_left(name, watched).keys()
            given = tensors_in((args, kwargs)) if self.uses is not None else []
            if stage == self.stage:
                args, kwargs = changed(args, self._here), changed(kwargs, self._here)
                self._ahead.clear()
                here = tensors_in((args, kwargs)) if given else []
                then = [*map(version, here)]
                with answered_by(None):
                    output = self.made(self._computed(module, function, args, kwargs))
                for tensor, own, before_call in zip(given, here, then, strict=True):
                    if self.uses is not None and version(own) != before_call:
                        self.uses.alters(name, tensor)
        if stage < self.stage:
            # Its stage has done its part. This stage computes with copies of the parameters, operation by operation.
            self._run.tell_of_order(name, stage, self.stage)
            with answered_by(None):
                output = function(*args, **kwargs)
        changed((args, kwargs, output), lambda tensor: known.add(id(tensor)) or tensor)  # type: ignore[func-returns-value]
        current.work.rng.at = 2 * number + 2
        with self._between.off():
            if self.uses is not None:
                collected = {kind: collector()[kind][size:] for kind, size in before.items()}
                self.uses.record(name, output, collected, [tensor.shape for tensor in given])
            left = {at: each for at, each in _tensors_left(name, watched).items() if at not in known}
            self._run.leaves[module] = bool(left) or self._run.leaves.get(module, False)
            self._run.left.update(left)
        if self.uses is not None and self.uses.is_complete:
            with self._between.off():
                self._enter(self._run.stages[-1].index)
                self._collect()
            raise Ended
        return output

    def _computed(self, module: nn.Module, function: Any, args: Any, kwargs: Any) -> Any:
        block = self._run.block(self.stage, self.microbatch, module)
        if block is None or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        at = current.work.rng.at

        def compute(value: Arguments) -> Any:
            current.work.rng.at = at
            return function(*value.args, **value.kwargs)

        value = Arguments(tuple(args), dict(kwargs))
        if not is_plain(value):
            self._run.tell_of_objects(module)
            return function(*args, **kwargs)
        output, forward = block.forward(compute, value, self._context())
        self.parts[self.stage].calls.append(forward)
        return output

    def _context(self) -> Context:
        """Return the settings in which the model calls a block: its forward may have entered autocast, for example."""
        context = Context.capture()
        context.function_modes = tuple(mode for mode in context.function_modes if mode is not self._between)
        # The variables are those of the caller: by its own a model collects what hooks inside of blocks see.
        context.variables = self._run.spec.context.variables
        return context

    # Tensors that the model uses.

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute an operation of the model itself, with the tensors of this stage."""
        looked: Any = changed(args, self.here)
        return self.made(function(*looked, **(changed(kwargs, self.here) if kwargs else kwargs)))

    def here(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` for an operation of the model itself, in this stage."""
        self.read(tensor)
        return self._here(tensor)

    def read(self, tensor: Tensor) -> None:
        """Note that the model uses ``tensor`` itself, in case a block has returned it."""
        if self.uses is not None:
            self.uses.note(tensor)
        left = self._run.left.get(id(tensor))
        if left is not None and left[0]() is tensor:
            raise RuntimeError(
                f"{type(self._run.model).__name__} reads {left[1]}, where a block has left a tensor; by the time that "
                "it is read, the block may have left that of another micro-batch there; let the block return it"
            )

    def _here(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            node = tensor.grad_fn
            if node is None:
                return self._run.parameter(tensor, self.stage)
            home = self._home(node)
            return tensor if home == self.stage else self._leaf(tensor, home).alias
        if self._run.copies:
            return self._run.parameter(tensor, self.stage) if self._run.is_of_model(tensor) else self._copy(tensor)
        return tensor

    def made(self, output: Any) -> Any:
        """Return the output of an operation on the device of this stage: it may have named that of another one.

        At once, since a change in place would be lost in a copy made for one operation.
        """
        return changed(output, self._moved) if self._run.copies else output

    def _home(self, node: Node) -> int:
        """Return the stage in whose turn ``node`` was made: nodes of a thread are numbered in order."""
        return bisect_right(self._limits, node._sequence_nr())

    def _leaf(self, tensor: Tensor, home: int) -> Leaf:
        leaves = self.parts[self.stage].leaves
        found = leaves.get(id(tensor))
        if found is None:
            # A stage between may have changed it in place; its own tensor is what comes after that.
            for j in range(self.stage - 1, home, -1):
                between = self.parts[j].leaves.get(id(tensor))
                if between is not None and between.alias._version != between.version:
                    return self._leaf(between.alias, j)
            leaf = self._received(tensor, home)
            alias = self._alias(leaf)
            found = leaves[id(tensor)] = Leaf(tensor, home, leaf, alias, alias._version)
            self.parts[home].sent[id(tensor)] = tensor
        return found

    def _alias(self, leaf: Tensor) -> Tensor:
        if not leaf.requires_grad:
            return leaf.detach()
        with torch.enable_grad():  # the model may be in no_grad() now, and use it outside of that later
            alias: Tensor = AsNonleaf.apply(leaf)  # type: ignore[no-untyped-call]
        return alias

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._run.places[self.stage][0]) if self._is_elsewhere(tensor) else tensor

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is on the device of another stage."""
        device = tensor.device
        if device == self._run.places[self.stage][0] or device not in self._run.devices:
            return False
        return bool(tensor.dim()) or device.type != "cpu" or tensor.requires_grad  # torch takes numbers as they are

    def _copy(self, tensor: Tensor) -> Tensor:
        """Return a tensor without gradient on the device of this stage."""
        known = self._copies.get(id(tensor))
        if known is not None and known.version == version(tensor):
            if known.stage == self.stage:
                return known.copy
            if version(known.copy) != known.own or known.copy.is_inference():  # where changes in place are not counted
                return self._here(known.copy)
        if not self._is_elsewhere(tensor):
            return tensor
        places = self._run.places
        home = max((j for j in range(self.stage) if places[j][0] == tensor.device), default=None)
        copy = self._moved(tensor) if home is None else self._received(tensor, home)
        self._copies[id(tensor)] = Copied(tensor, version(tensor), copy, version(copy), self.stage)
        return copy

    def _collect(self) -> None:
        """Take the used outputs of blocks to the last stage, from where the caller gets them."""
        if self.uses is not None:
            self.used = self.uses.collected()


def _tensors_left(name: str, block: nn.Module | None) -> dict[int, tuple[ref[Tensor], str]]:
    """Return the tensors in attributes of ``block``, or at the end of lists there, by identity, with their names."""
    found = {}
    for path, module in () if block is None else block.named_modules(prefix=name):
        if not type(module).__module__.startswith("torch.nn."):
            for attribute, value in vars(module).items():
                last = last_entry(value)
                if isinstance(last, Tensor):
                    found[id(last)] = ref(last), f"{path}.{attribute}"
    return found


def _nothing() -> Generator[None]:
    return
    yield
