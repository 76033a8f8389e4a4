"""Find the order in which a model uses its blocks, and the modules outside them, by one forward on ``meta``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .._torch import is_intercepting, set_intercepting
from ..checkpoint._random import interception
from ..module._inputs import Inputs
from ..transport._copy import StagePlace
from ..transport._transport import AnyChannel
from ._apart import tensors_in
from ._between import Between
from ._blocks import Order
from ._buffers import attributes_kept, copy_small_buffers, outside, restore
from ._cache import without_cache
from ._called import answered, answered_by
from ._elsewhere import Elsewhere, undrawn
from ._far import FarTensors
from ._generators import every_generator_restored
from ._tree import map_tree


def find_order(model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Inputs) -> Order:
    """Return the order in which ``model`` uses its ``blocks`` for ``inputs``. The model is not changed.

    A copy runs, with the same memory: its forward may register hooks, cache tensors, and remember that it did. Only if
    the model cannot be copied, it runs itself.

    Raises:
        RuntimeError: the forward needs values that blocks compute.
    """
    copied = _copy_model(model)
    copies = dict(zip(model.modules(), copied.modules(), strict=True))
    found = _order_in(copied, {name: copies[block] for name, block in blocks.items()}, inputs)
    if not found.blocks:  # the forward is a function that calls modules of the model itself
        return _order_in(model, blocks, inputs)
    originals = {each: module for module, each in copies.items()}
    return Order(found.blocks, {originals[module]: block for module, block in found.after.items()})


def _copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of ``model`` that shares the memory of its tensors; the model, if an attribute cannot be copied."""
    shared: dict[int, Any] = {id(tensor): tensor for module in model.modules() for tensor in tensors_in(module)}
    # Hooks on parameters belong to the copy as well. Subclasses have their own ways to share memory.
    plain = (parameter for parameter in model.parameters() if type(parameter) is nn.Parameter)
    shared |= {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in plain}
    try:
        return copy.deepcopy(model, shared)
    except Exception:
        return model


def _order_in(model: nn.Module, blocks: Mapping[str, nn.Module], inputs: Inputs) -> Order:
    args, kwargs = map_tree(inputs.args, Tensor.detach), map_tree(inputs.kwargs, Tensor.detach)
    dry_run = DryRun(model, blocks)
    with torch.no_grad(), _unchanged(model, blocks), without_cache(model), dry_run.watching():
        model(*args, **kwargs)
    return Order(dry_run.called, dry_run.after)


@contextmanager
def _unchanged(model: nn.Module, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    around = outside(model, blocks.values()) if model.training else []
    buffers = copy_small_buffers(buffer for module in around for buffer in module.buffers(recurse=False))
    before = is_intercepting()
    interception.prepare()
    with every_generator_restored(()):
        try:
            set_intercepting(True)
            with undrawn(), attributes_kept(model.modules()):
                yield
        finally:
            set_intercepting(before)
            restore(buffers)


class DryRun:
    """A dry run of the forward, in which blocks and operations on parameters are computed on ``meta``.

    Attributes:
        called: the names of the called blocks, by first call.
        after: for modules outside of blocks, the block that was called last before their first use, if any.
    """

    copies = offloads = False
    is_of_forward = True

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self.model, self._blocks = model, blocks
        self.places: Mapping[int, StagePlace] = {}
        self.devices: set[torch.device] = set()
        self.into: Mapping[int, Mapping[int, AnyChannel]] = {0: {}}
        self.called: list[str] = []
        self.after: dict[nn.Module, str | None] = {}
        self._last: str | None = None
        self.elsewhere = Elsewhere()
        self._outside = {*outside(model, blocks.values())}
        self._holders: dict[int, list[nn.Module]] = {}
        for module in self._outside:
            # A module is used where its parameters are used. Its buffers may only count calls.
            for tensor in (module._parameters or module._buffers).values():
                self._holders.setdefault(id(tensor), []).append(module)
        self._of_model = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._between = Between(self)
        self._tensors = FarTensors(self, 1, 0)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Handle the calls of blocks, and the operations between them, of a forward in this context."""
        # The call of a module around blocks does not show when its own parameters are used.
        around = {module for module in self._outside if not {*module.modules()} <= self._outside}
        hook = register_module_forward_pre_hook(lambda module, _: None if module in around else self._uses([module]))
        stages = dict.fromkeys(self._blocks.values(), 0)
        try:
            with answered(self._blocks, stages), answered_by(self), self._between:
                yield
        finally:
            hook.remove()

    def _uses(self, modules: list[nn.Module]) -> None:
        if len(modules) == 1 and modules[0] in self._outside:
            self.after.setdefault(modules[0], self._last)

    # Calls of blocks, and operations between them.

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        if name not in self.called:
            self.called.append(name)
        self._last = name
        with self._between.off(), answered_by(None):
            return self._tensors.place_output(self.elsewhere.call(name, module, function, args, kwargs), (args, kwargs))

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._tensors.compute(function, args, kwargs, self._tensors.here)

    def read(self, tensor: Tensor) -> None: ...

    # The tensors of the model.

    def own(self, tensor: Tensor) -> Tensor:
        return tensor

    def is_own(self, stage: int) -> bool:
        return False

    def is_of_model(self, tensor: Tensor) -> bool:
        return id(tensor) in self._of_model

    def find_stage(self, tensor: Tensor) -> int | None:
        self._uses(self._holders.get(id(tensor), []))
        is_known = not tensor.is_meta and not isinstance(tensor, nn.Parameter)
        return 0 if self.is_of_model(tensor) and not is_known else None

    def parameter(self, tensor: Tensor, stage: int) -> Tensor:
        raise AssertionError("no stage is in this process")

    def send(self, tensor: Tensor, source: int, target: int, done: Any) -> Callable[[], Tensor]:
        raise AssertionError("no stage is in this process")
