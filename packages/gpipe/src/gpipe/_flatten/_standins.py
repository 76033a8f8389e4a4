"""Modules that take the place of others in a segment to which these do not belong."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from .._current import current
from .._torch import no_torch_function
from ..values._leaves import storage_id
from ._calls import WITH_SAMPLE, Key, Like, Observed, like
from ._collected import Collected, collector, copied
from ._placeholders import Placeholder, Untouched, computed, is_computed, unknown
from ._script import output_name
from ._skeleton import unfollow
from ._tree import Tree, flattened

ShapesByName = dict[str, tuple[tuple[Any, ...], ...]]
"""What modules returned, tensors as :class:`Like`, by name and call."""


class Stop(BaseException):
    """The blocks of a segment are all called. No ``except Exception`` of a model catches it."""


class Tape:
    """One forward of a segment.

    Args:
        shapes: what modules of earlier segments returned.
        first, names: the number of the first block that the segment calls, and the names of these blocks.
        done: the leaves of what block ``first - 1`` returned.
        given: tensors that other modules of earlier segments returned, or were called with, and this one uses.
        collected: what hooks have collected up to the end of each list of blocks, by the number of its first block.
        inputs: the tensors that the model is called with.
        written: the tensors that the forward may change in place.

    Attributes:
        returned: the leaves and the tree of what observed modules returned, by name and in order.
        arguments: the leaves and the tree of what each block is called with.
        local: makes of a parameter or buffer of another layer what this forward computes with; else placeholders.
        fakes: for what stands for outputs of these blocks, by identity, their names.
        foreseen: whether blocks of earlier segments returned sizes that follow from the sample and their arguments.
    """

    def __init__(
        self,
        device: torch.device,
        shapes: ShapesByName,
        first: int,
        names: Sequence[str],
        done: list[Any],
        given: Mapping[Key, Tensor],
        collected: Mapping[int, Collected],
        inputs: Sequence[Tensor | None],
        written: Collection[Key],
    ) -> None:
        self.device, self._shapes, self._given, self._written = device, shapes, given, written
        self.collected = dict(collected)
        self._first, self._names, self.done = first, names, done
        self.arguments: list[tuple[list[Any], Tree]] = []
        self.fakes: dict[int, str] = {}
        self.foreseen = True
        self.local: Callable[[Tensor], Tensor] = lambda tensor: unknown(like(tensor), device, writable=False)
        self.returned: dict[str, list[tuple[list[Any], Tree]]] = {}
        self._real = {storage_id(leaf) for leaf in (*done, *given.values(), *inputs) if isinstance(leaf, Tensor)}
        self._context = self._present()
        self._counts = defaultdict[str, Iterator[int]](count)
        self._held: list[Any] = []

    def saw(self, name: str, output: Any) -> None:
        """Record what the module of this name returns, as it is now: a forward that changes it does so in each part."""
        calls, (leaves, tree) = self.returned.setdefault(name, []), flattened(output)
        kept = [leaf.clone() if (name, len(calls), m) in self._written else leaf for m, leaf in enumerate(leaves)]
        calls.append((kept, tree))

    def shapes(self) -> ShapesByName:
        found = dict(self._shapes)
        for name, calls in self.returned.items():
            known = found.get(name, ())
            found[name] = (*known, *(tuple(map(like, leaves)) for leaves, _ in calls[len(known) :]))
        return found

    def block(self, name: str, calls: Sequence[Observed], numbers: Sequence[int], given: Any) -> Any:
        """Record a call of a block, and return placeholders for its result.

        Args:
            calls: those of all blocks with the sample.
            numbers: which of these are its own.
        """
        j = self._number(name, numbers)
        call, (leaves, tree) = calls[j], flattened(given)
        if j < self._first:
            self._restore(name, j, leaves)
        if j == self._first and collector():
            self.collected[j] = copied(collector())
        elif j in self.collected:
            collector().update(copied(self.collected[j]))
        if j == self._first - 1:
            return call.result.value(self.done)
        if j >= self._first:
            self._expect_turn(j)
            self._expect_context(name)
            self.arguments.append((computed(leaves, f"block {name!r}"), tree))
            if len(self.arguments) == len(self._names):
                raise Stop
        known = self._shapes.get(output_name(j))
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        with no_torch_function():  # what stands for the output of a block refuses to tell its sizes
            now = like(first)
        likely: Sequence[Any] = [_likely(leaf, call.given, now) for leaf in call.outputs]
        if known:
            self.foreseen &= list(map(_sizes, known[0])) == list(map(_sizes, likely))
            likely = known[0]
        outputs = self._outputs(name, j, likely, writable=known is not None)
        if j >= self._first:
            outputs = [
                leaf.plain().as_subclass(Untouched) if isinstance(leaf, Placeholder) else leaf for leaf in outputs
            ]
            self._held.append(outputs)  # or their identities might be given out again
            self.fakes |= {id(leaf): output_name(j, m) for m, leaf in enumerate(outputs) if isinstance(leaf, Tensor)}
        return call.result.value(outputs)

    def _number(self, name: str, numbers: Sequence[int]) -> int:
        """The number, among the calls of all blocks, of the next call of one to which these ``numbers`` belong."""
        turn = next(self._counts[name])
        if turn >= len(numbers):
            raise RuntimeError(f"block {name!r} is called more often in this forward than {WITH_SAMPLE}")
        return numbers[turn]

    def _restore(self, name: str, j: int, leaves: Sequence[Any]) -> None:
        """Give what was computed for a block of an earlier segment its values, which later code uses."""
        for k, leaf in enumerate(leaves):
            value = self._given.get((name, j, -1 - k))
            # What this segment has computed itself is right, and its graph may have saved it.
            if value is not None and not is_computed(leaf) and storage_id(leaf) not in self._real:
                if like(leaf) != like(value):
                    raise RuntimeError(
                        f"later code takes a tensor {like(value)}, with which block {name!r} was called, for one "
                        f"{like(leaf)}, and did not {WITH_SAMPLE}"
                    )
                if isinstance(leaf, Placeholder):
                    leaf.is_known[:] = [True]
                vars(leaf).pop("stands_in", None)
                leaf.copy_(value)

    def expect_all(self) -> None:
        if self._names:
            self._expect_turn(None)

    def _expect_turn(self, j: int | None) -> None:
        turn = self._first + len(self.arguments)
        if j != turn:
            raise RuntimeError(
                f"block {self._names[turn - self._first]!r} is left out in this forward, or called out of turn; a "
                "flattened model calls its blocks as with the sample (is there a layerdrop? Set it to 0)"
            )

    def _present(self) -> tuple[Any, ...]:
        kind = self.device.type if self.device.type != "meta" else "cpu"
        return torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _expect_context(self, name: str) -> None:
        """Raise RuntimeError if the block is called in a context of the forward's own, which it would not run in."""
        if self._present() != self._context:
            raise RuntimeError(
                f"block {name!r} is called under torch.no_grad() or torch.autocast() of the forward's own, and a pipe "
                "calls it by itself; freeze what is not trained by requires_grad_(False), put autocast around the "
                "pipe, and leave torch.utils.checkpoint(use_reentrant=True) to GPipe(checkpoint=...)"
            )

    def early(self, name: str, calls: Sequence[Observed]) -> Any:
        """What a module of another segment returns: what is given, or placeholders, which a forward may write to."""
        if not calls:
            raise RuntimeError(f"{name!r} is called in this forward, and was not {WITH_SAMPLE}")
        number = next(self._counts[name])
        call = calls[min(number, len(calls) - 1)]
        known = self._shapes.get(name, ())
        leaves = known[number] if number < len(known) else call.outputs
        return call.result.value(self._outputs(name, number, leaves, writable=True))

    def _outputs(self, name: str, call: int, leaves: Sequence[Any], *, writable: bool) -> list[Any]:
        """Of what a module or block returned: what is given, and placeholders for the rest."""
        given = self._given
        return [
            given[name, call, m] if (name, call, m) in given else unknown(leaf, self.device, writable=writable)
            for m, leaf in enumerate(leaves)
        ]


def _likely(leaf: Any, then: Like | None, now: Like | None) -> Any:
    """``leaf`` of a result, as it is now: sizes and dtype that were those of the first argument follow this."""
    if not isinstance(leaf, Like) or then is None or now is None:
        return leaf
    sizes = [new if size == old else size for size, old, new in zip(leaf.shape, then.shape, now.shape, strict=False)]
    dtype = now.dtype if leaf.dtype == then.dtype else leaf.dtype
    return Like(torch.Size([*sizes, *leaf.shape[len(sizes) :]]), dtype)


def _sizes(leaf: Any) -> Any:
    return leaf.shape if isinstance(leaf, Like) else None


class Real:
    """The module that a stand-in answers for. It belongs to another layer.

    A copy of a layer alone does not copy it; a copy of a pipe has copied the model before.

    Attributes:
        module: as it is in the model; a copy on ``meta`` where that is in another process.
        is_copy: whether it is such a copy.
        asked: the attributes that a forward has read, with the modules that have them.
    """

    __slots__ = ("asked", "is_copy", "module")

    def __init__(self, module: nn.Module) -> None:
        self.module, self.is_copy = module, False
        self.asked: set[tuple[nn.Module, str]] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Real:
        return Real(memo.get(id(self.module), self.module))


_OF_ANOTHER = "that belongs to another layer, where it may read attributes, parameters' shapes and modules only"


class Likeness:
    """Answers, without data, for a module inside of one that has a stand-in."""

    def __init__(self, module: nn.Module, stand_in: StandIn) -> None:
        vars(self).update(_module=module, _stand_in=stand_in)

    def __setattr__(self, name: str, value: Any) -> None:
        self._stand_in.expect_settable(name)

    def __len__(self) -> int:
        return len(self._module)  # of a list

    def __bool__(self) -> bool:
        return bool(self._module)

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        raise TypeError(f"the forward calls a {type(self._module).__name__} {_OF_ANOTHER}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        module, stand_in = self._module, self._stand_in
        if name in module._modules:
            child = module._modules[name]
            return None if child is None else Likeness(child, stand_in)
        for tensors in (module._parameters, module._buffers):
            if name in tensors:
                tensor, tape = tensors[name], current.work.tape
                if tensor is None or tape is None:  # outside of a forward an initialisation may write to it
                    return unknown(like(tensor), torch.device("meta"))
                return tape.local(tensor)
        if name in vars(module):
            stand_in.real.asked.add((module, name))
            return vars(module)[name]
        answer = getattr(type(module), name, property())
        if callable(answer) or isinstance(answer, property):  # which would need the module
            raise AttributeError(f"the forward uses {name!r} of a {type(module).__name__} {_OF_ANOTHER}")
        return answer


class StandIn(nn.Module):
    """Answers for another module, and returns tensors of the shapes that it returned.

    Args:
        calls: of the module with the sample; of a block, those of all blocks.
        numbers: of a block, whose arguments are recorded: which of the calls are its own.
    """

    def __init__(self, real: nn.Module, name: str, calls: Sequence[Observed], numbers: Sequence[int] = ()) -> None:
        super().__init__()
        self.real = Real(real)
        self._name, self._calls, self._numbers = name, calls, numbers

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """In a forward, which may ask ``isinstance(layer, Attention)``, that of the module."""
        return StandIn if current.work.tape is None else type(self.real.module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tape = current.work.tape
        if tape is None:
            raise RuntimeError(
                f"{self._name!r} is called after the forward, as by torch.utils.checkpoint in the forward, which "
                "repeats a part of it; leave checkpointing to GPipe(checkpoint=...)"
            )
        if not self._numbers:
            return tape.early(self._name, self._calls)
        return tape.block(self._name, self._calls, self._numbers, (args, kwargs))

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
        """Raise RuntimeError if the forward sets an attribute of a block, which runs by itself, and would not see it.

        Of another module it may: what runs that has the same forward.
        """
        if current.work.tape is not None and self._numbers:
            raise RuntimeError(f"the forward sets {name!r} of block {self._name!r}; call the block with it")

    @property
    def training(self) -> bool:
        return "real" in self.__dict__ and self.real.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "real" in self.__dict__ and self.real.is_copy:  # else the module itself is told
            self.real.module.train(mode)


def saw(name: str, module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that records what the module of this name returns."""
    if (tape := current.work.tape) is not None:
        tape.saw(name, output)


def let_go(layers: nn.Module) -> None:
    """Let ``layers`` keep no data of a model whose other layers are elsewhere, nor follow it."""
    for module in layers.modules():
        unfollow(module)
        vars(module).pop("twins", None)
        if isinstance(module, StandIn):
            real = module.real
            state: list[Tensor] = [*real.module.parameters(), *real.module.buffers()]
            # Detached, since a graph of the copies would hold the data, and the nodes at which gradients arrive.
            bare = {id(each): each.detach().to("meta").requires_grad_(each.requires_grad) for each in state}
            real.module = copy.deepcopy(real.module, bare)
            real.is_copy = True
