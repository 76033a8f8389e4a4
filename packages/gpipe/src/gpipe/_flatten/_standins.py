"""Modules that take the place of others in a segment to which these do not belong."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ._calls import LOOKS, Key, ModuleCall, Shape, shape_of
from ._skeleton import placeholder
from ._tree import Tree, flattened


class Stop(BaseException):
    """The blocks of a segment are all called. No ``except Exception`` of a model shall hold it up."""


class ContextError(ValueError):
    """A block is called in another context than the forward."""


class Tape:
    """One forward of a segment.

    Args:
        device: where stand-ins make tensors.
        shapes: what modules of earlier segments returned, by name and call.
        first: the number of the first block that the segment calls; those before are done.
        names: of these blocks; none in the segment that ends the model.
        done: the leaves of what block ``first - 1`` returned.
        given: tensors that other modules of earlier segments returned, and this one uses.

    Attributes:
        returned: the leaves of what modules returned that belong here, by name and call.
        arguments: the leaves and the tree of what each block is called with.
        fakes: for what stands for an output of one of these blocks, its number and place.
        done: as given.
        begun: whether the forward has come to what belongs here, after the blocks of earlier segments.
    """

    def __init__(
        self,
        device: torch.device,
        shapes: dict[str, tuple[tuple[Any, ...], ...]],
        first: int,
        names: Sequence[str],
        done: list[Any],
        given: Mapping[Key, Tensor],
    ) -> None:
        self.device = device
        self.shapes = {name: list(calls) for name, calls in shapes.items()}
        self.arguments: list[tuple[list[Any], Tree]] = []
        self.fakes: dict[int, tuple[int, int]] = {}
        self.returned: dict[tuple[str, int], list[Any]] = {}
        self.begun = not first
        self._context = self._present()
        self._given = given
        self._first = first
        self._names = names
        self.done = done
        self._counts: dict[str, int] = {}
        self._keep: list[Any] = []

    def block(self, name: str, j: int, call: ModuleCall, args: Any, kwargs: Any) -> Any:
        """Record a call of block number ``j``, and return placeholders for its result."""
        assert call.result is not None
        if j == self._first - 1:
            self.begun = True
            return call.result.value(self.done)
        leaves, tree = flattened((args, kwargs))
        if j >= self._first:
            self._expect_turn(j)
            self._expect_context(name)
            self.arguments.append((leaves, tree))
            if len(self.arguments) == len(self._names):
                raise Stop
        outputs = [self._given.get((name, 0, m), self._like(leaf, leaves, call)) for m, leaf in enumerate(call.outputs)]
        if j >= self._first:
            # Fake tensors, by which profiles are made without a device, cannot be of another class.
            outputs = [leaf.as_subclass(Untouched) if type(leaf) is Tensor else leaf for leaf in outputs]
            self._keep.append(outputs)  # or their identities might be given out again
            self.fakes.update({id(leaf): (j, m) for m, leaf in enumerate(outputs) if isinstance(leaf, Tensor)})
        return call.result.value(outputs)

    def expect_all(self) -> None:
        """Raise RuntimeError if the forward has ended before all blocks were called."""
        if self._names:
            self._expect_turn(None)

    def _expect_turn(self, j: int | None) -> None:
        turn = self._first + len(self.arguments)
        if j != turn:
            raise RuntimeError(
                f"block {self._names[turn - self._first]!r} is left out in this forward, or called out of turn; a "
                "flattened model calls each block once (is there a layerdrop? Set it to 0)"
            )

    def _present(self) -> dict[str, Any]:
        kind = self.device.type if self.device.type != "meta" else "cpu"
        return {
            "torch.no_grad()": torch.is_grad_enabled(),
            "torch.autocast()": (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        }

    def _expect_context(self, name: str) -> None:
        """Raise ContextError if the block is called in a context of the forward's own, which it would not run in."""
        now = self._present()
        for what, then in self._context.items():
            if now[what] != then:
                raise ContextError(
                    f"block {name!r} is called under {what} of the forward's own, and a pipe calls it by itself; "
                    "freeze what is not trained by requires_grad_(False), and put autocast around the pipe"
                )

    def count(self, name: str) -> int:
        """A module is called; how often it had been."""
        self._counts[name] = self._counts.get(name, 0) + 1
        return self._counts[name] - 1

    def saw(self, name: str, output: Any) -> None:
        """A module that belongs here has returned ``output``."""
        known, number, leaves = self.shapes.setdefault(name, []), self.count(name), flattened(output)[0]
        if number == len(known):
            known.append(tuple(map(shape_of, leaves)))
        self.returned[name, number] = leaves

    def early(self, name: str, calls: list[ModuleCall]) -> Any:
        """Record a call of a module of another segment, and return placeholders for its result."""
        number = self.count(name)
        call = calls[min(number, len(calls) - 1)]
        known = self.shapes.get(name, ())
        leaves = known[number] if number < len(known) else call.outputs
        assert call.result is not None
        found = [self._given.get((name, number, m), self._unknown(leaf, call)) for m, leaf in enumerate(leaves)]
        return call.result.value(found)

    def _like(self, leaf: Any, arguments: list[Any], call: ModuleCall) -> Any:
        """A new tensor for an output, which looks like the first argument if it did in the sample."""
        first = next((each for each in arguments if isinstance(each, Tensor)), None)
        if first is not None and isinstance(leaf, Shape) and first.is_floating_point():
            shape = first.shape if first.dim() == len(leaf.shape) else leaf.shape
            leaf = Shape(shape, first.dtype if leaf.dtype == call.given else leaf.dtype)
        return self._unknown(leaf, call)

    def _unknown(self, leaf: Any, call: ModuleCall) -> Any:
        return unknown(leaf, self.device, call.written) if isinstance(leaf, Shape) else leaf


def unknown(shape: Shape, device: torch.device, written: bool = False) -> Tensor:
    """A placeholder tensor, filled with NaN. It takes no memory, unless it may be written to."""
    value = math.nan if shape.dtype.is_floating_point or shape.dtype.is_complex else 0
    size = shape.shape if written else ()
    return placeholder(torch.full(size, value, dtype=shape.dtype, device=device).expand(shape.shape))


class Untouched(Tensor):
    """The output of a block until the next block of its list is called. No operation may use it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if function in LOOKS:
            with torch.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        raise RuntimeError(
            f"an operation ({getattr(function, '__name__', function)}) uses what a block returns before the next block "
            "of the list is called, where only blocks may compute"
        )


class _Thread(threading.local):
    tape: Tape | None = None


_thread = _Thread()


def current_tape() -> Tape | None:
    """The tape of the segment whose forward is going on in this thread."""
    return _thread.tape


@contextmanager
def running(tape: Tape) -> Iterator[None]:
    """A context for the forward of a segment: its stand-ins find the ``tape``."""
    before, _thread.tape = _thread.tape, tape
    try:
        yield
    finally:
        _thread.tape = before


def _tensor_like(shape: Shape) -> Tensor:
    """A placeholder for a parameter or buffer. Outside of a forward it may be written to, by an initialisation."""
    tape = current_tape()
    return torch.empty(shape.shape, dtype=shape.dtype, device="meta") if tape is None else unknown(shape, tape.device)


class Real:
    """The module that a stand-in answers for. It belongs to another layer.

    A copy of a layer alone does not copy it; a copy of a pipe has copied the model before.

    Attributes:
        module: as it is in the model; a copy on ``meta`` where that is in another process.
        is_copy: whether it is such a copy.
        asked: the attributes that a forward has asked for, with the modules that have them.
    """

    __slots__ = ("asked", "is_copy", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.is_copy = module, False
        self.asked: set[tuple[nn.Module, str]] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Real:
        return Real(memo.get(id(self.module), self.module))

    def let_go(self) -> None:
        """Keep no data of the module."""
        state: list[Tensor] = [*self.module.parameters(), *self.module.buffers()]
        self.module = copy.deepcopy(self.module, {id(tensor): tensor.to("meta") for tensor in state})
        self.is_copy = True


class Likeness:
    """Answers as a module inside of another one does that has a stand-in, without data.

    Forwards ask for such things: ``self.embeddings.projection.weight.dtype``.
    """

    def __init__(self, module: nn.Module, stand_in: StandIn) -> None:
        vars(self).update(_module=module, _stand_in=stand_in)

    def __setattr__(self, name: str, value: Any) -> None:
        self._stand_in.expect_settable(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        module, stand_in = self._module, self._stand_in
        if name in module._modules:
            child = module._modules[name]
            return child and Likeness(child, stand_in)
        for tensors in (module._parameters, module._buffers):
            if name in tensors:
                shape = shape_of(tensors[name])
                return _tensor_like(shape) if isinstance(shape, Shape) else shape
        if name in vars(module):
            stand_in.real.asked.add((module, name))
            return vars(module)[name]
        answer = getattr(type(module), name, property())
        if callable(answer) or isinstance(answer, property):  # which would need the module
            raise AttributeError(f"what stands for a {type(module).__name__} has no {name}")
        return answer


class StandIn(nn.Module):
    """Answers for another module, like which it looks."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.real = Real(real)

    def __setattr__(self, name: str, value: Any) -> None:
        self.expect_settable(name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "real" not in self.__dict__:
                raise
        return getattr(Likeness(self.real.module, self), name)

    def expect_settable(self, name: str) -> None:
        """The forward sets an attribute: what runs the module does so too, as it has the same forward."""

    @property
    def training(self) -> bool:
        return "real" in self.__dict__ and self.real.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "real" in self.__dict__ and self.real.is_copy:  # else the module itself is told
            self.real.module.train(mode)


class BlockStandIn(StandIn):
    """Takes down what a block is called with."""

    def __init__(self, real: nn.Module, name: str, number: int, call: ModuleCall) -> None:
        super().__init__(real)
        self._name = name
        self._number = number
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return current_tape().block(self._name, self._number, self._call, args, kwargs)  # type: ignore[union-attr]

    def expect_settable(self, name: str) -> None:
        """Raise RuntimeError in a forward: the block runs by itself, and would not see it."""
        if current_tape() is not None:
            raise RuntimeError(f"the forward sets {name!r} of block {self._name!r}; call the block with it")


class ModuleStandIn(StandIn):
    """Returns what has the shape of what a module returned."""

    def __init__(self, real: nn.Module, name: str, calls: list[ModuleCall]) -> None:
        super().__init__(real)
        self._name = name
        self._calls = calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return current_tape().early(self._name, self._calls)  # type: ignore[union-attr]


class Observe:
    """A forward hook that takes down what a module returns."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if (tape := current_tape()) is not None:
            tape.saw(self._name, output)
