"""Watch a run of a model: which parts of its forward use what others compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..values._leaves import storage_id, tensors_of
from ._calls import DRAWN, Calls, Observed, Origin
from ._draws import Draws
from ._inputs import Inputs
from ._sources import Sources, is_whole
from ._tree import flattened


def watch(model: nn.Module, inputs: Inputs, trunks: Sequence[Sequence[str]]) -> Calls:
    """Run ``model`` once, without gradients, and record what the parts of its forward use."""
    watcher = _Watcher(model, trunks)
    with torch.no_grad(), watcher.hooks(), _Asked(watcher.sizes_of, watcher.values_of), watcher:
        watcher.use(inputs.call(model), of_block=True)  # a model may return what a block returned
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
        self._draws = Draws()
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
        self.use((args, kwargs), of_block=is_block)
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

    def use(self, value: Any, *, of_block: bool = False) -> None:
        """Note that a forward uses ``value``: gives it to a block or returns it (``of_block``), or computes with it."""
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
            self.use(tensor)
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
        if self._draws.decides(func, args):
            return func(*args, **(kwargs or {}))  # the same, whatever was drawn
        self.use((args, kwargs))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._draws.note(func, args, kwargs, result)
        found = {*map(storage_id, tensors_of(result))}
        if func._schema.is_mutable:
            self.calls.written.update(source[:3] for source in self.of(result) if isinstance(source, Origin))
        else:  # not a view
            found -= {*map(storage_id, tensors_of((args, kwargs)))}
        self._computed |= found
        if torch.Tag.data_dependent_output in getattr(func, "tags", ()):
            self._read |= self.of((args, kwargs))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.add(result, frozenset([Origin(DRAWN, 0, 0, self._segment)]))
        return result
