"""Observe one run of a model: which modules it calls, and how values pass between blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from ._inputs import Inputs
from ._tree import Tree, flattened


def order_of_calls(model: nn.Module, inputs: Inputs, names: Collection[str]) -> list[str]:
    """The names in ``names`` of the modules that ``model`` calls, in order, each as often as it is called."""
    called: list[str] = []
    with ExitStack() as scope, torch.no_grad():
        for name in names:
            hook = partial(_note, called, name)
            scope.callback(model.get_submodule(name).register_forward_pre_hook(hook).remove)
        inputs.call(model)
    return called


def _note(called: list[str], name: str, *_: Any) -> None:
    called.append(name)


class Shape(NamedTuple):
    """The shape, dtype and device of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def shape_of(leaf: Any) -> Any:
    """The :class:`Shape` of a tensor; other objects are returned as they are."""
    return Shape(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


class Origin(NamedTuple):
    """A tensor that a block or another module returned.

    Attributes:
        name: of the module in the model.
        call: how often it had been called before.
        place: among the leaves of what it returned.
        segment: where it was called; of a block, that before its trunk.
        is_block: whether the module is a block.
    """

    name: str
    call: int
    place: int
    segment: int
    is_block: bool = False


Key = tuple[str, int, int]
"""The name, call and place of a :class:`Origin`."""


@dataclass
class ModuleCall:
    """What a block, or a module outside of blocks, returned.

    Attributes:
        segment: where a module outside of blocks was called.
        given: the dtype of the first tensor among its arguments.
        outputs: the leaves, tensors as :class:`Shape`.
        result: what puts these together.
        written: whether operations change it in place afterwards.
    """

    segment: int = 0
    given: torch.dtype | None = None
    outputs: list[Any] = field(default_factory=list)
    result: Tree | None = None
    written: bool = False

    def returned(self, output: Any) -> None:
        """Record the end of the call."""
        leaves, self.result = flattened(output)
        self.outputs = list(map(shape_of, leaves))


@dataclass
class Calls:
    """What happened in a run, outside of blocks by segment.

    Attributes:
        blocks: the calls of all blocks, in order.
        modules: the calls of each module that is called outside of blocks, and not by another such one.
        tensors: for each parameter and buffer that operations outside of blocks read: its segments.
        between: names of modules that are called between two blocks of a trunk.
        needs: for each segment, what it and the blocks after it use of earlier ones, beside the last block before it.
    """

    blocks: list[ModuleCall] = field(default_factory=list)
    modules: dict[nn.Module, list[ModuleCall]] = field(default_factory=dict)
    tensors: dict[int, set[int]] = field(default_factory=dict)
    between: list[str] = field(default_factory=list)
    needs: dict[int, set[Origin]] = field(default_factory=dict)

    def skips(self, wanted: Callable[[Origin, int], bool]) -> dict[str, Key]:
        """The tensors that skip layers, by the name of the skip: those of ``wanted(source, segment that needs it)``."""
        return {
            f"output {source.place} of call {source.call} of {source.name} for segment {segment}": source[:3]
            for segment, sources in self.needs.items()
            for source in sources
            if wanted(source, segment)
        }

    def add(self, other: Calls) -> None:
        """Add what another run needs besides."""
        for key, segments in other.tensors.items():
            self.tensors.setdefault(key, set()).update(segments)
        for segment, sources in other.needs.items():
            self.needs.setdefault(segment, set()).update(sources)
        for module, calls in other.modules.items():
            self.modules.setdefault(module, calls)
        for call, again in zip(self.blocks, other.blocks, strict=False):
            call.written |= again.written


def watch(model: nn.Module, inputs: Inputs, trunks: Sequence[Sequence[str]]) -> Calls:
    """Run ``model`` once, without gradients, and record what it calls."""
    watcher = _Watcher(model, trunks)
    with torch.no_grad(), watcher.hooks(), _Reads(watcher):
        inputs.call(model)
    for call, tensor, version in watcher.versions:
        call.written |= tensor._version != version
    return watcher.calls


class _Watcher:
    """Knows in which segment the run is; None inside a trunk."""

    def __init__(self, model: nn.Module, trunks: Sequence[Sequence[str]]) -> None:
        self.calls = Calls()
        self.state = {id(t) for t in (*model.parameters(), *model.buffers())}
        self.segment: int | None = 0
        self.inside = 0
        self._origins: dict[int, frozenset[Origin | int]] = {}
        self._held: list[Any] = []  # or identities would be given out again
        self.versions: list[tuple[ModuleCall, Tensor, int]] = []
        self._model = model
        self._names = {model.get_submodule(name): name for trunk in trunks for name in trunk}
        self._blocks = [[model.get_submodule(name) for name in trunk] for trunk in trunks]

    @contextmanager
    def hooks(self) -> Iterator[None]:
        blocks = {block for trunk in self._blocks for block in trunk}
        inner = {module for block in blocks for module in block.modules()}
        with ExitStack() as scope:
            for t, trunk in enumerate(self._blocks):
                for block in trunk:
                    begin = partial(self._begin, t)
                    scope.callback(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
                    scope.callback(block.register_forward_hook(partial(self._end, t)).remove)
            for name, module in self._model.named_modules():
                if module not in inner and blocks.isdisjoint(module.modules()):
                    enter, leave = partial(self._enter, name), partial(self._leave, name)
                    scope.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                    scope.callback(module.register_forward_hook(leave).remove)
            yield

    def _begin(self, trunk: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._use((args, kwargs), trunk)
        self.segment = None
        self.inside += 1
        first = next((leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
        self.calls.blocks.append(ModuleCall(given=None if first is None else first.dtype))

    def _end(self, trunk: int, block: nn.Module, args: Any, output: Any) -> None:
        self.inside -= 1
        self.calls.blocks[-1].returned(output)
        self._name(output, self.calls.blocks[-1], Origin(self._names[block], 0, 0, trunk, is_block=True))
        self.segment = trunk + 1 if block is self._blocks[trunk][-1] else None

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.inside:
            if self.segment is not None:
                self._use((args, kwargs), self.segment)
            if self.segment is None:
                self.calls.between.append(name)
            else:
                self.calls.modules.setdefault(module, []).append(ModuleCall(segment=self.segment))
        self.inside += 1

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.inside -= 1
        if not self.inside and self.segment is not None:
            calls = self.calls.modules[module]
            calls[-1].returned(output)
            self._name(output, calls[-1], Origin(name, len(calls) - 1, 0, self.segment))

    def _name(self, output: Any, call: ModuleCall, source: Origin) -> None:
        """Note where tensors come from. A module may return what it was given, which then comes from both."""
        for place, leaf in enumerate(flattened(output)[0]):
            if isinstance(leaf, Tensor):
                self._made(leaf, frozenset([source._replace(place=place)]))
                self.versions.append((call, leaf, leaf._version))

    def _made(self, tensor: Tensor, origins: frozenset[Origin | int]) -> None:
        self._origins[id(tensor)] = self._origins.get(id(tensor), frozenset()) | origins
        self._held.append(tensor)

    def _use(self, value: Any, segment: int) -> frozenset[Origin | int]:
        """Note that ``segment`` uses the tensors in ``value``; what they are made of, parameters by identity."""
        tensors = [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        origins = frozenset[Origin | int]().union(*map(self._origins_of, tensors))
        for origin in origins:
            if isinstance(origin, int):
                self.calls.tensors.setdefault(origin, set()).add(segment)
            elif origin.segment < segment and origin.name != self._before(segment):
                self.calls.needs.setdefault(segment, set()).add(origin)
        return origins

    def _origins_of(self, tensor: Tensor) -> frozenset[Origin | int]:
        own = frozenset([id(tensor)]) if id(tensor) in self.state else frozenset[int]()
        return own | self._origins.get(id(tensor), frozenset())

    def _before(self, segment: int) -> str:
        """The name of the last block before ``segment``."""
        return self._names[self._blocks[segment - 1][-1]]

    def operation(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Carry out an operation, and note what it reads and makes."""
        if self.segment is None:
            return function(*args, **kwargs)
        if self.inside or function in LOOKS:
            self._read((args, kwargs), self.segment)
            return function(*args, **kwargs)
        origins = self._use((args, kwargs), self.segment)
        result = function(*args, **kwargs)
        for leaf in _pytree.tree_leaves(result) if origins else ():
            if isinstance(leaf, Tensor):
                self._made(leaf, origins)
        return result

    def _read(self, value: Any, segment: int) -> None:
        """Note that ``segment`` reads the parameters and buffers in ``value``."""
        for leaf in _pytree.tree_leaves(value):
            if id(leaf) in self.state:
                self.calls.tensors.setdefault(id(leaf), set()).add(segment)


LOOKS = {
    *(
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.__len__,
        Tensor.stride,
    ),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_meta", "is_sparse", "grad_fn", "is_leaf")),
}
"""What looks at a tensor and not at its elements."""


class _Reads(TorchFunctionMode):
    """Tells what operations read."""

    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._watcher.operation(function, args, kwargs or {})
