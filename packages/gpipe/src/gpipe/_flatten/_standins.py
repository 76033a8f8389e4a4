"""Modules that take the place of others in a segment to which these do not belong."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..engine._parameters import parameters_of
from ._calls import LOOKS, BlockCall, ModuleCall, Shape, Source, shape_of
from ._skeleton import Follower, placeholder
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
        begun: whether the forward has come to what belongs here, after the blocks of earlier segments.
    """

    def __init__(
        self,
        device: torch.device,
        shapes: dict[str, tuple[tuple[Any, ...], ...]],
        first: int,
        names: Sequence[str],
        done: list[Any],
        given: Mapping[Source, Tensor | None],
    ) -> None:
        self.device = device
        self.shapes = {name: list(calls) for name, calls in shapes.items()}
        self.arguments: list[tuple[list[Any], Tree]] = []
        self.fakes: dict[int, tuple[int, int]] = {}
        self.returned: dict[tuple[str, int], list[Any]] = {}
        self.begun = not first
        self._context = self._present()
        self._given = {source[:3]: tensor for source, tensor in given.items() if tensor is not None}
        self._first = first
        self._names = names
        self._done = done
        self._counts: dict[str, int] = {}
        self._keep: list[Any] = []

    def block(self, name: str, j: int, call: BlockCall, args: Any, kwargs: Any) -> Any:
        """Record a call of block number ``j``, and return placeholders for its result."""
        assert call.result is not None
        if j == self._first - 1:
            self.begun = True
            return call.result.value(self._done)
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

    def _like(self, leaf: Any, arguments: list[Any], call: BlockCall) -> Any:
        """A new tensor for an output, of the shape of the first argument: most blocks return what they got."""
        if not isinstance(leaf, Shape):
            return leaf
        first = next((each for each in arguments if isinstance(each, Tensor)), None)
        fits = first is not None and first.dim() == len(leaf.shape) and first.is_floating_point()
        return self._unknown(Shape(first.shape if fits and first is not None else leaf.shape, leaf.dtype), call)

    def _unknown(self, leaf: Any, call: BlockCall) -> Any:
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


class Reel:
    """Where stand-ins find the tape of the forward that is going on."""

    tape: Tape | None = None

    @property
    def device(self) -> torch.device | None:
        """Where stand-ins make tensors; None outside of a forward."""
        return None if self.tape is None else self.tape.device

    def unknown(self, shape: Shape) -> Tensor:
        """A placeholder for a parameter or buffer. Outside of a forward it may be written to, by an initialisation."""
        if self.device is None:
            return torch.empty(shape.shape, dtype=shape.dtype, device="meta")
        return unknown(shape, self.device)


class Likeness:
    """The attributes of a module, and what its parameters, buffers and children look like.

    Forwards ask for such things: ``self.embeddings.projection.weight.dtype``. It does not hold the module itself, which
    belongs to another layer, and perhaps to another device.
    """

    def __init__(self, real: nn.Module, reel: Reel) -> None:
        self._reel = reel
        self._kind = type(real)
        self._answers = {name: value for name, value in vars(real).items() if not name.startswith("_")}
        self._answers |= {name: shape_of(value) for name, value in {**real._parameters, **real._buffers}.items()}
        self._answers |= {name: child and Likeness(child, reel) for name, child in real._modules.items()}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._answers:
            answer = self._answers[name]
            return self._reel.unknown(answer) if isinstance(answer, Shape) else answer
        answer = getattr(self._kind, name, property())
        if callable(answer) or isinstance(answer, property):  # which would need the module
            raise AttributeError(f"what stands for a {self._kind.__name__} has no {name}")
        return answer


class StandIn(nn.Module):
    """Answers for another module, like which it looks."""

    def __init__(self, real: nn.Module, reel: Reel) -> None:
        super().__init__()
        self._likeness = Likeness(real, reel)
        self._reel = reel

    def look(self, real: nn.Module, dtypes: Mapping[torch.dtype, torch.dtype]) -> None:
        """Look at the module again, in which these dtypes have become others."""
        self._likeness = Likeness(real, self._reel)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_likeness" not in self.__dict__:
                raise
        return getattr(self.__dict__["_likeness"], name)


class BlockStandIn(StandIn):
    """Takes down what a block is called with."""

    def __init__(self, real: nn.Module, reel: Reel, name: str, number: int, call: BlockCall) -> None:
        super().__init__(real, reel)
        self._name = name
        self._number = number
        self._call = call

    def look(self, real: nn.Module, dtypes: Mapping[torch.dtype, torch.dtype]) -> None:
        super().look(real, dtypes)
        self._call.outputs = [
            leaf._replace(dtype=dtypes.get(leaf.dtype, leaf.dtype)) if isinstance(leaf, Shape) else leaf
            for leaf in self._call.outputs
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._reel.tape.block(self._name, self._number, self._call, args, kwargs)  # type: ignore[union-attr]


class ModuleStandIn(StandIn):
    """Returns what has the shape of what a module returned."""

    def __init__(self, real: nn.Module, reel: Reel, name: str, calls: list[ModuleCall]) -> None:
        super().__init__(real, reel)
        self._name = name
        self._calls = calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._reel.tape.early(self._name, self._calls)  # type: ignore[union-attr]


class Look(Follower):
    """Lets a stand-in look at its module again when that has parameters of another dtype or shape.

    Args:
        module: a :class:`StandIn`.
        source: the module of the model, which a layer must not hold: it would be copied with that.
    """

    def __init__(self, module: nn.Module, source: nn.Module) -> None:
        assert isinstance(module, StandIn)
        self.module = module
        self._source = source
        self._then = self._now()

    def _now(self) -> list[tuple[torch.dtype, torch.Size]]:
        return [(parameter.dtype, parameter.shape) for parameter in parameters_of(self._source)]

    def follow(self) -> None:
        now = self._now()
        if now != self._then:
            pairs = zip(self._then, now, strict=False)
            self.module.look(self._source, {before: after for (before, _), (after, _) in pairs})
            self._then = now


class Observe:
    """A forward hook that takes down what a module returns."""

    def __init__(self, reel: Reel, name: str) -> None:
        self._reel = reel
        self._name = name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._reel.tape is not None:
            self._reel.tape.saw(self._name, output)
