"""Parameters and buffers that several partitions share: all partitions but the first compute with copies.

Two workers must not add to the same ``.grad`` in an order that depends on timing; and a partition needs its tensors on
its own device. So during a run only the first partition with such a tensor, its **owner**, computes with the tensor
itself. The modules of the others hold a copy: a leaf in the same memory or, on another device, in memory that is filled
when the run begins. At the end the gradients of the copies are added to the owner's, in the order of partitions.

A module that several partitions share is copied too, shallowly. A layer must not change it. Source: the tied layers of
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from streams import current_stream, record_stream

from ..values._leaves import storage_id, version
from ._stage import Stage


class Contents(NamedTuple):
    """A module and all modules below it, with what they hold.

    Attributes:
        modules: each once, in order.
        parameters: each once.
        tensors: the identities of parameters and buffers.
    """

    modules: dict[nn.Module, None]
    parameters: list[nn.Parameter]
    tensors: set[int]


def contents_of(root: nn.Module) -> Contents:
    modules: dict[nn.Module, None] = {}
    parameters: dict[int, nn.Parameter] = {}
    buffers: set[int] = set()
    stack: list[Any] = [root]
    while stack:
        each = stack.pop()
        if each is not None and each not in modules:
            modules[each] = None
            stack += reversed(each._modules.values())
            parameters.update(zip(map(id, each._parameters.values()), each._parameters.values(), strict=True))
            buffers.update(map(id, each._buffers.values()))
    parameters.pop(id(None), None)
    return Contents(modules, [*parameters.values()], buffers.union(parameters) - {id(None)})


LeafGradient = tuple[Tensor, Tensor]
"""A leaf and its gradient."""


def shared_tensors(found: Sequence[set[int]]) -> dict[int, int]:
    """By the identities of what each part has: of tensors that several parts have, the number of the first part."""
    if sum(map(len, found)) == len(set[int]().union(*found)):
        return {}
    first: dict[int, int] = {}
    several: set[int] = set()
    for j, own in enumerate(found):
        several |= own & first.keys()
        first |= dict.fromkeys(own - first.keys(), j)
    return {key: first[key] for key in several}


def holds_tensors(module: nn.Module) -> bool:
    return bool(contents_of(module).tensors)


class Tied:
    """The tensors that several partitions of ``stages`` share, for one run, which begins here.

    Attributes:
        shares: whether there are any; if not, nothing has to be applied or joined.
        leaves: for each stage the leaves, owners and copies, whose gradients have to be summed.
    """

    def __init__(self, stages: Sequence[Stage], parts: Sequence[Contents]) -> None:
        self._stages = stages
        shared = shared_tensors([part.tensors for part in parts]) if len(parts) > 1 else {}
        self.shares = bool(shared)
        self.leaves: list[list[Tensor]] = [[] for _ in stages]
        # The dicts of modules and the names in them that refer to copies during a run, and these copies.
        self._swaps: list[tuple[dict[str, Any], str, Any]] = []
        self._owners: dict[Tensor, tuple[int, Tensor]] = {}
        self._modules: dict[nn.Module, nn.Module] = {}
        earlier: set[nn.Module] = set()
        for number, (modules, _, _) in enumerate(parts):
            # Without tensors there is nothing to copy, but attributes that a layer may change.
            self._modules |= {each: each for each in modules.keys() & earlier if not holds_tensors(each)}
            if shared:
                copies = _Copies(number, stages[number].device, shared, frozenset(earlier))
                self._swaps += copies.swaps(modules.keys() - earlier)
                self._owners |= {copy: (number, tensor) for tensor, copy in copies.tensors.items()}
                self._modules |= {copy: module for module, copy in copies.modules.items()}
                self.leaves[number] = [*filter(_is_trained, copies.tensors.values())]
            earlier.update(modules)
        self._looked = False
        # Layers may only read what is shared: this is compared with what is there after the forwards.
        self._then = self._seen() if shared or self._modules else {}

    def applied(self) -> AbstractContextManager[None]:
        """A context in which the modules of each stage hold its copies. There must be no other run of the stages.

        The first use, which includes all forwards, raises RuntimeError if a forward has changed what is shared.
        """
        return self._swapped() if self._then else nullcontext()

    @contextmanager
    def _swapped(self) -> Iterator[None]:
        before = [entries.get(name) for entries, name, _ in self._swaps]
        try:
            for entries, name, copy in self._swaps:
                entries[name] = copy
            try:
                yield
            except RuntimeError as error:
                self._expect_unchanged(error)  # the change may be the cause of the error
                raise
            self._expect_unchanged(None)
        finally:
            self._looked = True
            for (entries, name, copy), own in zip(self._swaps, before, strict=True):
                if entries.get(name) is copy:  # a layer may have set something else
                    entries[name] = own

    def expect_once(self, leaves: Iterable[Tensor]) -> None:
        """Raise RuntimeError if a loss uses several of ``leaves`` that are copies of one: a loop has found them all."""
        owners = [self._owners[leaf][1] for leaf in leaves if leaf in self._owners]
        if len(owners) > len({*owners}):
            raise RuntimeError(
                "loss_fn goes over parameters or modules of the pipe, and finds those that partitions share several "
                "times, since each partition has a copy during a step; list them before it, as in "
                "parameters = list(pipe.parameters()), or use the optimizer's weight_decay"
            )

    def joined(self, gradients: Sequence[LeafGradient]) -> list[LeafGradient]:
        """``gradients`` with owners in place of copies, on the owners' devices, in the order of the stages."""
        found = [(*self._owners.get(leaf, (0, leaf)), gradient) for leaf, gradient in gradients]
        # By stage, since sums of floats depend on their order, and threads arrive in any.
        found.sort(key=lambda each: each[0])
        # An owner may have been frozen since the forward: then autograd drops its gradient too.
        return [(owner, _arrived(gradient, owner.device)) for _, owner, gradient in found if owner.requires_grad]

    def _seen(self) -> dict[tuple[Any, str], Any]:
        """What layers may only read, by a tensor or module and a name in it."""
        tensors = (tensor for copy, (_, own) in self._owners.items() for tensor in (copy, own))
        seen: dict[tuple[Any, str], Any] = {(tensor, ""): _state(tensor) for tensor in tensors}
        for module in self._modules:
            for entries in (vars(module), *_entries(module)):
                seen |= {(module, name): (id(value), _state(value)) for name, value in entries.items()}
        return seen

    def _expect_unchanged(self, cause: RuntimeError | None) -> None:
        now = self._then if self._looked else self._seen()
        changed = [key for key in {**self._then, **now} if now.get(key) != self._then.get(key)]
        if changed:
            raise RuntimeError(
                f"a layer changed {self._name(*changed[0])}, which partitions share; they work side by side, so that "
                "they may only read it: put the layers that share it into one partition, or give each a copy of its own"
            ) from cause

    def _name(self, changed: Tensor | nn.Module, what: str) -> str:
        is_tensor = isinstance(changed, Tensor)
        own = self._owners[changed][1] if is_tensor else self._modules[changed]  # type: ignore[index]
        for stage in self._stages:
            module = stage.module
            named = (module.named_parameters, module.named_buffers) if is_tensor else (module.named_modules,)
            for name, value in chain.from_iterable(each(remove_duplicate=False) for each in named):
                if value is own:
                    place = f"{name!r} of partition {stage.index}"
                    return f"{place} in place" if is_tensor else f"{what!r} of {place}"
        return repr(what)


def _arrived(gradient: Tensor, device: torch.device) -> Tensor:
    """``gradient`` on ``device``, when the current streams have waited for those on which it was computed."""
    # Its memory belongs to the stream of a stage, which would use it again while this one still copies.
    record_stream(gradient, current_stream(gradient.device))
    return gradient.to(device)


class _Copies:
    """The tensors and modules with which a partition computes.

    Args:
        number: the number of the partition among those in this process.
        shared: by identity of a tensor, the number of the first partition that has it.
        earlier: the modules of the partitions before.

    Attributes:
        tensors: for each shared tensor that of this partition: a copy, or the tensor itself.
        modules: copies of the modules that an earlier partition has too.
    """

    def __init__(
        self, number: int, device: torch.device, shared: Mapping[int, int], earlier: frozenset[nn.Module]
    ) -> None:
        self._number, self._device, self._shared, self._earlier = number, device, shared, earlier
        self.tensors: dict[Any, Tensor] = {}
        self.modules: dict[Any, nn.Module] = {}

    def swaps(self, modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
        held = [(entries, *item) for module in modules for entries in _entries(module) for item in entries.items()]
        return [(entries, name, own) for entries, name, value in held if (own := self._own(value)) is not value]

    def _own(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._own_module(value) if value in self._earlier and holds_tensors(value) else value
        if id(value) not in self._shared:
            return value
        if value not in self.tensors:
            is_owner = self._shared[id(value)] == self._number
            self.tensors[value] = value if is_owner else copy_of(value, self._device)
        return self.tensors[value]

    def _own_module(self, module: nn.Module) -> nn.Module:
        if module not in self.modules:
            self.modules[module] = copy = object.__new__(type(module))
            # Neither __init__ nor __setattr__ of the class is called: their arguments and effects are unknown.
            vars(copy).update(vars(module), _compiled_call_impl=None)  # that call is bound to ``module``
            for kind in _KINDS:
                vars(copy)[kind] = {name: self._own(value) for name, value in vars(module)[kind].items()}
        return self.modules[module]


_KINDS = ("_parameters", "_buffers", "_modules")


def _entries(module: nn.Module) -> list[dict[str, Any]]:
    return [vars(module)[kind] for kind in _KINDS]


def _state(value: Any) -> Any:
    """The memory of a tensor, and its version; None for anything else."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return None
    return storage_id(value), version(value)


def copy_of(tensor: Tensor, device: torch.device) -> Tensor:
    """A leaf like ``tensor`` on ``device``: in the same memory if it is there; ``tensor`` itself if not trained."""
    # A leaf of its own, in the same memory where it can be: its gradient is apart from that of the owner.
    there = (tensor.detach() if _is_trained(tensor) else tensor).to(device)
    if there is tensor:
        return tensor
    if issubclass(type(tensor), nn.Parameter):
        own = there.as_subclass(type(tensor))
    elif isinstance(tensor, nn.Parameter):  # a tensor of another class that was made a parameter
        own = nn.Parameter(there, tensor.requires_grad)
    else:
        own = there
    # Layers may read attributes. Those that it has already may hold its data, as of wrappers of tensors.
    vars(own).update({**vars(tensor), **vars(own)})
    return own.requires_grad_() if _is_trained(tensor) else own


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()
