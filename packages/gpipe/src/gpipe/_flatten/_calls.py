"""Observe runs of a model: what its modules return, and which parts of its forward use what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..values._memory import storage_id
from ._inputs import Inputs
from ._sources import Sources, is_whole, tensors_of
from ._tree import Tree, flattened


class Like(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def like(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_nested and leaf.layout is torch.strided:
        raise ValueError(
            "the model cannot be divided: its modules pass nested tensors, which have no shape; nn.TransformerEncoder "
            "makes them of a padding mask: give it enable_nested_tensor=False"
        )
    return Like(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


class Observed(NamedTuple):
    """What a module returned.

    Attributes:
        outputs: the leaves, tensors as :class:`Like`.
        result: the tree of these.
        given: the first tensor among its arguments.
    """

    outputs: list[Any]
    result: Tree
    given: Like | None

    @classmethod
    def of(cls, args: Any, output: Any) -> Observed:
        leaves, tree = flattened(output)
        first = next(iter(tensors_of(args)), None)
        return cls(list(map(like, leaves)), tree, None if first is None else like(first))


Called = list[tuple[nn.Module, Observed]]


def observe(model: nn.Module, inputs: Inputs) -> tuple[Called, Any]:
    """All calls of modules in a run without gradients, in the order in which they end, and the output of the model."""
    called: Called = []
    with ExitStack() as scope, torch.no_grad():
        for module in model.modules():
            scope.callback(module.register_forward_hook(partial(_note, called), with_kwargs=True).remove)
        return called, inputs.call(model)


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
_DRAWN = "random numbers"


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
        if any(source.name == _DRAWN for sources in self.needs.values() for source in sources):
            raise ValueError(
                f"{name} cannot be divided: its forward draws random numbers before blocks and uses them after these, "
                "where they would be drawn again; pass them as arguments, or let a module draw and return them"
            )


def watch(model: nn.Module, inputs: Inputs, trunks: Sequence[Sequence[str]]) -> Calls:
    """Run ``model`` once, without gradients, and record what the parts of its forward use."""
    watcher = _Watcher(model, trunks)
    with torch.no_grad(), watcher.hooks(), _Asked(watcher.sizes_of, watcher.values_of), watcher:
        inputs.call(model)
    return watcher.calls


SIZES = frozenset(
    [Tensor.shape.__get__, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.__len__]  # type: ignore[attr-defined]
)
"""How a forward asks for the sizes of a tensor, which a placeholder does not know."""

VALUES = frozenset([Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__])
"""How a forward takes the values of a tensor without an operation of torch."""


class _Asked(TorchFunctionMode):
    """While it is on, it tells of tensors that are asked for their sizes or values, of which no operation knows."""

    def __init__(self, sizes_of: Callable[[Tensor], None], values_of: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._told = {**dict.fromkeys(SIZES, sizes_of), **dict.fromkeys(VALUES, values_of)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._told:
            self._told[func](args[0])
        return func(*args, **(kwargs or {}))


class _Watcher(Sources):  # type: ignore[no-untyped-call]
    """Knows the segment of the run, and follows what modules return, and parameters and buffers by identity."""

    def __init__(self, model: nn.Module, trunks: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.calls = Calls()
        self._segment = 0
        self._computed: set[int] = set()  # memory whose values operations outside of modules have computed
        self._inside: list[nn.Module] = []  # blocks and modules whose forward goes on
        self._read: frozenset[Any] = frozenset()  # sources of values that became numbers, as by item() and `if`
        self._model = model
        names = list(chain.from_iterable(trunks))
        self._blocks = {model.get_submodule(name): name for name in reversed(names)}
        self._last = [end - 1 for end in accumulate(map(len, trunks))]  # the numbers of the last calls of trunks
        for tensor in (*model.parameters(), *model.buffers()):
            self.add(tensor, frozenset([id(tensor)]))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        inner = {module for block in self._blocks for module in block.modules()}
        with ExitStack() as scope:
            for name, module in self._model.named_modules():
                if module in self._blocks or (module not in inner and self._blocks.keys().isdisjoint(module.modules())):
                    scope.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                    leave = partial(self._leave, self._blocks.get(module, name))
                    scope.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._inside.append(module)
        if len(self._inside) > 1:
            return
        is_block = module in self._blocks
        self._use((args, kwargs), of_block=is_block)
        self._note(id(module))
        if is_block:
            self._keep_arguments(self._blocks[module], (args, kwargs))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if len(self._inside) == 1:
            self._note_call(name, module, (args, kwargs), output)
        self._inside.pop()

    def _note_call(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        is_block = module in self._blocks
        calls = self.calls.blocks if is_block else self.calls.modules.setdefault(module, [])
        source = Origin(name, len(calls), 0, self._segment, is_block)
        calls.append(Observed.of(given, output))
        self._computed.difference_update(map(storage_id, tensors_of(output)))
        for place, leaf in enumerate(flattened(output)[0]):
            # A module may return what it was given, which then comes from both.
            self.add(leaf, frozenset([source._replace(place=place)]))
        if is_block and source.call in self._last:
            self._segment += 1
            self._use_sources(self._read)  # each segment reads them again; what depends on the numbers is not seen

    def _keep_arguments(self, name: str, given: Any) -> None:
        """Let later segments take what was computed for this block from its arguments, not from all before it."""
        for k, leaf in enumerate(flattened(given)[0]):
            if not isinstance(leaf, Tensor) or storage_id(leaf) not in self._computed:
                continue
            if is_whole(leaf) and any(isinstance(source, Origin) for source in self.of(leaf)):
                source = Origin(name, len(self.calls.blocks), -1 - k, self._segment, is_block=True)
                self._known[storage_id(leaf)] = leaf, frozenset([source])

    def _use(self, value: Any, *, of_block: bool = False) -> None:
        self._use_sources(self.of(value), of_block=of_block)

    def _use_sources(self, sources: frozenset[Any], *, of_block: bool = False) -> None:
        for source in sources:
            if not isinstance(source, Origin):
                self._note(source)
                continue
            # What the block before returned comes to each segment as it is.
            if source.segment < self._segment and not (
                source.is_output and source.call == self._last[self._segment - 1]
            ):
                self.calls.needs.setdefault(self._segment, set()).add(source)
            if source.is_output and not of_block:
                self._cut_behind(source)

    def values_of(self, tensor: Tensor) -> None:
        """Note that a forward takes the values of ``tensor``."""
        if not self._inside:
            self._use(tensor)
            self._read |= self.of(tensor)

    def sizes_of(self, tensor: Tensor) -> None:
        """Note that a forward asks for the sizes of ``tensor``."""
        if not self._inside:
            for source in self.of(tensor):
                if isinstance(source, Origin) and source.is_output:
                    self._cut_behind(source)

    def _cut_behind(self, output: Origin) -> None:
        """Let what follows be of a segment after the block, where its output is known."""
        self.calls.used.add(output.call)
        if output.segment == self._segment:
            self.calls.cuts.add(len(self.calls.blocks))

    def _note(self, key: int) -> None:
        self.calls.segments.setdefault(key, set()).add(self._segment)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            if self._inside[0] not in self._blocks:
                for source in self.of((args, kwargs)):
                    if not isinstance(source, Origin):
                        self._note(source)
            return func(*args, **(kwargs or {}))
        self._use((args, kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        found = {*map(storage_id, tensors_of(result))}
        if func._schema.is_mutable:
            self.calls.written.update(source[:3] for source in self.of(result) if isinstance(source, Origin))
        else:  # not a view
            found -= {*map(storage_id, tensors_of((args, kwargs)))}
        self._computed |= found
        if torch.Tag.data_dependent_output in getattr(func, "tags", ()):
            self._read |= self.of((args, kwargs))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.add(result, frozenset([Origin(_DRAWN, 0, 0, self._segment)]))
        return result
