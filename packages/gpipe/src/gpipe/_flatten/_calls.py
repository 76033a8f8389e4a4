"""One run of a model, watched: what is called when, and what becomes of the values between blocks."""

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
    """Those of the modules called ``names`` that ``model`` calls, in order, each as often as it is called."""
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
    """What a tensor looks like."""

    shape: torch.Size
    dtype: torch.dtype


def shape_of(leaf: Any) -> Any:
    """The :class:`Shape` of a tensor; anything else as it is."""
    return Shape(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


@dataclass
class BlockCall:
    """What a block returned.

    Attributes:
        outputs: the leaves, tensors as :class:`Shape`.
        result: what puts these together.
    """

    outputs: list[Any] = field(default_factory=list)
    result: Tree | None = None

    def returned(self, output: Any) -> None:
        """The call has ended."""
        leaves, self.result = flattened(output)
        self.outputs = list(map(shape_of, leaves))


@dataclass
class ModuleCall(BlockCall):
    """What a module outside of blocks returned.

    Attributes:
        segment: where.
    """

    segment: int = 0


@dataclass
class Calls:
    """What happened in a run, outside of blocks by segment.

    Attributes:
        blocks: the calls of all blocks, in order.
        modules: the calls of each module that is called outside of blocks, and not by another such one.
        tensors: for each parameter and buffer that operations outside of blocks read: its segments.
        between: names of modules that are called between two blocks of a trunk.
    """

    blocks: list[BlockCall] = field(default_factory=list)
    modules: dict[nn.Module, list[ModuleCall]] = field(default_factory=dict)
    tensors: dict[int, set[int]] = field(default_factory=dict)
    between: list[str] = field(default_factory=list)


def watch(model: nn.Module, inputs: Inputs, trunks: Sequence[Sequence[str]]) -> Calls:
    """Run ``model`` once, without gradients, and note what it calls."""
    watcher = _Watcher(model, trunks)
    with torch.no_grad(), watcher.hooks(), _Reads(watcher):
        inputs.call(model)
    return watcher.calls


class _Watcher:
    """Knows in which segment the run is; None inside a trunk."""

    def __init__(self, model: nn.Module, trunks: Sequence[Sequence[str]]) -> None:
        self.calls = Calls()
        self.state = {id(t) for t in (*model.parameters(), *model.buffers())}
        self.segment: int | None = 0
        self.inside = 0
        self._model = model
        self._blocks = [[model.get_submodule(name) for name in trunk] for trunk in trunks]

    @contextmanager
    def hooks(self) -> Iterator[None]:
        blocks = {block for trunk in self._blocks for block in trunk}
        inner = {module for block in blocks for module in block.modules()}
        with ExitStack() as scope:
            for t, trunk in enumerate(self._blocks):
                for block in trunk:
                    last = t if block is trunk[-1] else None
                    scope.callback(block.register_forward_pre_hook(self._begin).remove)
                    scope.callback(block.register_forward_hook(partial(self._end, last)).remove)
            for name, module in self._model.named_modules():
                if module not in inner and blocks.isdisjoint(module.modules()):
                    scope.callback(module.register_forward_pre_hook(partial(self._enter, name)).remove)
                    scope.callback(module.register_forward_hook(self._leave).remove)
            yield

    def _begin(self, block: nn.Module, args: Any) -> None:
        self.segment = None
        self.inside += 1
        self.calls.blocks.append(BlockCall())

    def _end(self, last_of: int | None, block: nn.Module, args: Any, output: Any) -> None:
        self.inside -= 1
        self.calls.blocks[-1].returned(output)
        self.segment = None if last_of is None else last_of + 1

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        if not self.inside:
            if self.segment is None:
                self.calls.between.append(name)
            else:
                self.calls.modules.setdefault(module, []).append(ModuleCall(segment=self.segment))
        self.inside += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.inside -= 1
        if not self.inside and self.segment is not None:
            self.calls.modules[module][-1].returned(output)

    def read(self, tensor: Tensor) -> None:
        if id(tensor) in self.state and self.segment is not None:
            self.calls.tensors.setdefault(id(tensor), set()).add(self.segment)


class _Reads(TorchFunctionMode):
    """Tells which parameters and buffers operations read."""

    def __init__(self, watcher: _Watcher) -> None:
        super().__init__()
        self._watcher = watcher

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in _pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._watcher.read(leaf)
        return function(*args, **(kwargs or {}))
