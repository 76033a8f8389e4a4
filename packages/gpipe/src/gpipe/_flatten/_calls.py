"""What happens in a run of a model: what its modules return, and which parts of its forward use what."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..values._constants import is_constant
from ._inputs import Inputs
from ._tree import Tree, flattened

WITH_SAMPLE = (
    "with the sample, from which the layers were made; make a new pipe with a sample that the model treats alike"
)
"""The end of errors of a forward that does something else than with the sample."""


class Like(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def like(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_nested and leaf.layout is torch.strided:
        raise ValueError(
            "the model cannot be divided: its modules pass nested tensors, which have no shape; nn.TransformerEncoder "
            "makes them of a padding mask: give it enable_nested_tensor=False, or set its use_nested_tensor to False"
        )
    return Like(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


def is_as_then(leaf: Any, then: Any) -> bool:
    """Whether both are tensors, or equal; objects that cannot go from stage to stage are not compared."""
    if isinstance(leaf, Tensor) or isinstance(then, Like):
        return isinstance(leaf, Tensor) and isinstance(then, Like)
    return leaf is then or not (is_constant(leaf) or is_constant(then)) or bool(leaf == then)


class Observed(NamedTuple):
    """What a module returned.

    Attributes:
        outputs: the leaves, tensors as :class:`Like`.
        result: the tree of these.
        given: the first tensor among its arguments.
        arguments: the tree of these.
    """

    outputs: list[Any]
    result: Tree
    given: Like | None
    arguments: Tree

    @classmethod
    def of(cls, args: Any, output: Any) -> Observed:
        leaves, tree = flattened(output)
        given, arguments = flattened(args)
        first = next((leaf for leaf in given if isinstance(leaf, Tensor)), None)
        return cls(list(map(like, leaves)), tree, None if first is None else like(first), arguments)


Called = list[tuple[nn.Module, Observed]]


def observe(model: nn.Module, inputs: Inputs) -> tuple[Called, Any]:
    """All calls of modules in a run without gradients, in the order in which they end, and the output of the model."""
    called: Called = []
    with ExitStack() as scope, torch.no_grad():
        for module in model.modules():
            scope.callback(module.register_forward_hook(partial(_note, called), with_kwargs=True).remove)
        before = [tensor._version for tensor in inputs.tensors()]
        output = inputs.call(model)
        if before != [tensor._version for tensor in inputs.tensors()]:
            raise ValueError(
                f"{type(model).__name__} cannot be divided: its forward changes an input in place, once in each part "
                "that has the input; change a clone"
            )
        return called, output


def _note(called: Called, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    called.append((module, Observed.of((args, kwargs), output)))


class Origin(NamedTuple):
    """A tensor that a block or another module returned, that a block was called with, or that was drawn at random.

    Attributes:
        name: of the module in the model.
        call: how often it had been called before; of a block, the number of this call among those of all blocks.
        place: among the leaves of what it returned; -1 and below for those of its arguments, in order.
        segment: where it was called; of a block, that before its trunk.
    """

    name: str
    call: int
    place: int
    segment: int
    is_block: bool = False

    @property
    def is_output(self) -> bool:
        """Whether a block returned it."""
        return self.is_block and self.place >= 0


Key = tuple[str, int, int]
"""The name, call and place of a :class:`Origin`."""
DRAWN = "random numbers"


@dataclass
class Calls:
    """What happened in a run, outside of blocks by segment.

    Attributes:
        blocks: the calls of all blocks, in order.
        modules: the calls of each module that is called outside of blocks, and not by another such one.
        segments: for each such module, parameter and buffer, by identity, the segments that call or read it.
        needs: for each segment, what it and the blocks after it use of earlier ones, beside the last block before it.
        cuts: the numbers of block calls before which something is computed from what others of their trunk returned, or
            from its sizes.
        used: the numbers of block calls from whose results, or their sizes, anything is computed outside of blocks.
        written: the tensors that may have been changed in place outside of modules.
    """

    blocks: list[Observed] = field(default_factory=list)
    modules: dict[nn.Module, list[Observed]] = field(default_factory=dict)
    segments: dict[int, set[int]] = field(default_factory=dict)
    needs: dict[int, set[Origin]] = field(default_factory=dict)
    cuts: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    written: set[Key] = field(default_factory=set)

    def skips(self, wanted: Callable[[Origin, int], bool]) -> dict[str, Key]:
        """The tensors that skip layers, by the name of the skip: those of ``wanted(source, segment that needs it)``."""
        return {
            f"output {source.place} of call {source.call} of {source.name} for segment {segment}": source[:3]
            for segment, sources in self.needs.items()
            for source in sources
            if wanted(source, segment)
        }

    def segments_of(self, unit: nn.Module) -> set[int]:
        parts = (unit, *unit.parameters(), *unit.buffers())
        return set[int]().union(*(self.segments.get(id(part), ()) for part in parts))

    def add(self, other: Calls) -> None:
        """Add what another run needs."""
        for key, segments in other.segments.items():
            self.segments.setdefault(key, set()).update(segments)
        for segment, sources in other.needs.items():
            self.needs.setdefault(segment, set()).update(sources)
        if len(other.blocks) == len(self.blocks):  # else blocks were left out, and their numbers are others
            self.cuts |= other.cuts
        self.used |= other.used
        self.written |= other.written
        self.modules = {**other.modules, **self.modules}

    def expect_drawn_once(self, name: str) -> None:
        """Raise ValueError, naming the model, if random numbers are used after blocks that were drawn before these."""
        if any(source.name == DRAWN for sources in self.needs.values() for source in sources):
            raise ValueError(
                f"{name} cannot be divided: its forward draws random numbers before blocks and uses them after these, "
                "where they would be drawn again; pass them as arguments, or let a module draw and return them; "
                "set a layerdrop to 0"
            )
