"""Parameters and buffers that several partitions share: all partitions but the first compute with copies.

Two workers must not add to the same ``.grad`` in an order that depends on timing, and a partition needs its tensors on
its own device. So during a run, only the first partition with a shared tensor, its **owner**, computes with the tensor
itself. The modules of the other partitions hold a copy: a leaf in the same memory or, on a different device, in memory
that is filled when the run begins. At the end, the copies' gradients are added to the owner's in partition order.

A module that several partitions share is also copied, but shallowly. A layer must not change it. Source: the tied
layers of DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from streams import current_stream, record_stream

from ..values._leaves import storage_id, version
from ._accumulate import GradientSums
from ._offloaded import Offload, Offloaded, dtype_of_guest
from ._stage import Stage


class Contents(NamedTuple):
    """A module and all its submodules, with their contents.

    Attributes:
        modules: without duplicates, in order.
        parameters: without duplicates.
        tensors: the ids of parameters and buffers.
    """

    modules: dict[nn.Module, None]
    parameters: list[nn.Parameter]
    tensors: set[int]


def collect_contents(root: nn.Module) -> Contents:
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


def find_shared_tensors(found: Sequence[set[int]]) -> dict[int, int]:
    """Map the id of each tensor that several parts contain to the index of the first such part."""
    if sum(map(len, found)) == len(set[int]().union(*found)):
        return {}
    first: dict[int, int] = {}
    several: set[int] = set()
    for j, own in enumerate(found):
        several |= own & first.keys()
        first |= dict.fromkeys(own - first.keys(), j)
    return {key: first[key] for key in several}


def holds_tensors(module: nn.Module) -> bool:
    return bool(collect_contents(module).tensors)


class Tied:
    """The tensors that several partitions of ``stages`` share, for one run. Create it when the run begins.

    Attributes:
        shares: whether any tensor is shared.
        leaves: per stage, the owners and copies whose gradients have to be summed.
        offloaded: the copies of stages whose parameters are on the host, by stage.
    """

    def __init__(
        self, stages: Sequence[Stage], parts: Sequence[Contents], offloaded: Sequence[Offloaded | None] = ()
    ) -> None:
        self._stages = stages
        self._offloaded = offloaded or [None] * len(parts)
        found = zip(stages, self._offloaded, strict=True)
        self.offloaded = {stage.index: each for stage, each in found if each is not None}
        self._offload: Offload = next((each.offload for each in self.offloaded.values()), False)
        shared = find_shared_tensors([part.tensors for part in parts]) if len(parts) > 1 else {}
        self.shares = bool(shared) or bool(self.offloaded)
        self.leaves: list[list[Tensor]] = [[] for _ in stages]
        # Entries in the dicts of modules that refer to copies during a run, with these copies.
        self._swaps: list[tuple[dict[str, Any], str, Any]] = []
        self._owners: dict[Tensor, tuple[int, Tensor]] = {}
        self._given: dict[Tensor, tuple[int, Tensor]] = {}
        self._modules: dict[nn.Module, nn.Module] = {}
        earlier: set[nn.Module] = set()
        for number, (modules, _, _) in enumerate(parts):
            # A module without tensors is not copied, but a layer may change its attributes.
            self._modules |= {each: each for each in modules.keys() & earlier if not holds_tensors(each)}
            if shared or self._offloaded[number] is not None:
                copies = _Copies(number, stages[number].device, shared, frozenset(earlier), self._offloaded[number])
                self._swaps += copies.swaps(modules.keys() - earlier)
                self._owners |= {copy: (number, tensor) for tensor, copy in copies.tensors.items()}
                self._modules |= {copy: module for module, copy in copies.modules.items()}
                self.leaves[number] = [*filter(_is_trained, copies.tensors.values())]
            earlier.update(modules)
        # An optimizer may update these during a run.
        self._homes = {home for each in self.offloaded.values() for home in each.homes}
        for each in self.offloaded.values():
            each.every_home = self._homes
        self._looked = False
        # Layers may only read shared state, so it is compared with this record after the forwards.
        self._then = self._seen() if self.shares or self._modules else {}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the modules of each stage hold its copies. No other run of the stages may be active.

        The first use, which includes all forwards, raises RuntimeError if a forward has changed shared state.
        """
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
            try:
                self._swap_back(before)
            except BaseException:
                try:
                    self._swap_back(before)  # again after an interrupt
                finally:
                    self._swap_back(before)  # and after another one
                raise

    def _swap_back(self, before: Sequence[Any]) -> None:
        for (entries, name, copy), own in zip(self._swaps, before, strict=True):
            if entries.get(name) is copy:  # a layer may have assigned something else
                entries[name] = own

    def copy(self, tensor: Tensor, number: int, device: torch.device) -> Tensor:
        """Return a new copy of ``tensor`` for stage ``number``, which computes with it although it is not its own."""
        own = self._owners.get(tensor, (0, tensor))[1]
        copy = copy_to_device(own, device, dtype_of_guest(own, self._offload))
        if copy is not own:
            self.shares = True
            self._owners[copy] = number, own
            for each in {own, copy} - self._homes:  # from now on, since its own stage may have changed it before
                self._then.setdefault((each, ""), _state(each))
        return copy

    def accept(self, tensor: Tensor) -> None:
        """Take the state of ``tensor`` and its copies as unchanged, because it was changed before any stage used it."""
        own = self.get_owner(tensor)
        for each, name in [*self._then]:
            if isinstance(each, Tensor) and self.get_owner(each) is own:
                self._then[each, name] = _state(each)

    def find_guest(self, tensor: Tensor, stage: int) -> Tensor | None:
        """Return the copy of an offloaded parameter that a stage uses while it is loaded."""
        return self.offloaded[stage].find(self.get_owner(tensor)) if stage in self.offloaded else None

    def guests(self) -> dict[int, int]:
        """Map the ids of all guests to the index of their stage."""
        return {id(leaf): stage for stage, each in self.offloaded.items() for leaf in each.leaves}

    def get_owner(self, tensor: Tensor) -> Tensor:
        """Return what ``tensor`` is a copy of, or ``tensor`` itself."""
        return self._owners.get(tensor, (0, tensor))[1]

    def owners_of_others(self, sums: Iterable[GradientSums]) -> set[Tensor]:
        """Return the owners whose gradients are not complete before the run ends.

        Those are the owners of leaves in ``sums``, and of copies that do not belong to a load of their stage.
        """
        guests = self.guests()
        others = [owner for copy, (_, owner) in [*self._owners.items()] if id(copy) not in guests]
        return {*others, *(self.get_owner(leaf) for each in sums for leaf in each.leaves)}

    def give(self, leaf: Tensor, tensor: Tensor) -> None:
        """Give the gradient of ``leaf``, which the loss uses instead of it, to a ``tensor`` of the caller."""
        self.shares = True
        self._given[leaf] = len(self._stages), tensor

    def expect_once(self, leaves: Iterable[Tensor]) -> None:
        """Raise RuntimeError if ``leaves`` of a loss include several copies of one tensor, e.g. found by a loop."""
        owners = [self._owners[leaf][1] for leaf in leaves if leaf in self._owners]
        if len(owners) > len({*owners}):
            raise RuntimeError(
                "loss_fn goes over parameters or modules of the pipe, and finds those that partitions share several "
                "times, since each partition has a copy during a step; list them before it, as in "
                "parameters = list(pipe.parameters()), or use the optimizer's weight_decay"
            )

    def map_to_owners(self, gradients: Sequence[LeafGradient]) -> list[LeafGradient]:
        """Map the ``gradients`` of copies to their owners, in the order of the stages."""
        owners = {**self._given, **self._owners}
        found = [(*owners.get(leaf, (0, leaf)), gradient) for leaf, gradient in gradients]
        # Sorted by stage, because sums of floats depend on their order, and threads finish in any order.
        found.sort(key=lambda each: each[0])
        # If an owner was frozen since the forward, its gradient is dropped, as in autograd.
        return [(owner, _move_gradient(gradient, owner)) for _, owner, gradient in found if owner.requires_grad]

    def _seen(self) -> dict[tuple[Any, str], Any]:
        """Record the state that layers may only read, with (tensor or module, name) as keys."""
        pairs = ((copy, own) for copy, (_, own) in self._owners.items())
        tensors = (tensor for pair in pairs for tensor in pair if tensor not in self._homes)
        seen: dict[tuple[Any, str], Any] = {(tensor, ""): _state(tensor) for tensor in tensors}
        for module in self._modules:
            for entries in (vars(module), *_entries(module)):
                seen |= {(module, name): (id(value), _state(value)) for name, value in entries.items()}
        return seen

    def _expect_unchanged(self, cause: RuntimeError | None) -> None:
        now = self._then if self._looked else self._seen()
        changed = [key for key in {**self._then, **now} if now.get(key) != self._then.get(key)]
        if changed and self.offloaded and isinstance(changed[0][0], Tensor):
            raise RuntimeError(
                f"a layer changed {self._name(*changed[0])}, which is on the host (offload=): the stage computes with "
                "a copy, so the change would be lost; change parameters after the step, or do not offload"
            ) from cause
        if changed:
            raise RuntimeError(
                f"a layer changed {self._name(*changed[0])}, which partitions share; they work side by side, so that "
                "they may only read it: put the layers that share it into one partition, or give each a copy of its own"
            ) from cause

    def _name(self, changed: Tensor | nn.Module, what: str) -> str:
        is_tensor = isinstance(changed, Tensor)
        own = self.get_owner(changed) if isinstance(changed, Tensor) else self._modules[changed]
        for stage in self._stages:
            module = stage.module
            named = (module.named_parameters, module.named_buffers) if is_tensor else (module.named_modules,)
            for name, value in chain.from_iterable(each(remove_duplicate=False) for each in named):
                if value is own:
                    place = f"{name!r} of partition {stage.index}"
                    return f"{place} in place" if is_tensor else f"{what!r} of {place}"
        return repr(what)


def _move_gradient(gradient: Tensor, owner: Tensor) -> Tensor:
    """Return ``gradient`` for ``owner``; the current streams must have waited for the streams that computed it."""
    # Its memory belongs to the stream of a stage, which must not reuse it before the copy is complete.
    record_stream(gradient, current_stream(gradient.device))
    return gradient.to(owner.device, owner.dtype)


class _Copies:
    """The tensors and modules that a partition computes with.

    Args:
        number: the index of the partition in this process.
        offloaded: holds its guests, if its parameters are on the host; they replace all of its parameters.
        shared: maps the id of a tensor to the index of the first partition that has it.
        earlier: the modules of the previous partitions.

    Attributes:
        tensors: maps each shared tensor to a copy, or to itself if this partition owns it.
        modules: copies of the modules that an earlier partition also has.
    """

    def __init__(
        self,
        number: int,
        device: torch.device,
        shared: Mapping[int, int],
        earlier: frozenset[nn.Module],
        offloaded: Offloaded | None,
    ) -> None:
        self._number, self._device, self._shared, self._earlier = number, device, shared, earlier
        self._offloaded = offloaded
        self.tensors: dict[Any, Tensor] = {}
        self.modules: dict[Any, nn.Module] = {}

    def swaps(self, modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
        held = [(entries, *item) for module in modules for entries in _entries(module) for item in entries.items()]
        for entries, name, value in held:
            self._expect_guest(entries, name, value)
        return [(entries, name, own) for entries, name, value in held if (own := self._own(value)) is not value]

    def _own(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            return self._own_module(value) if value in self._earlier and holds_tensors(value) else value
        if id(value) not in self._shared or self._is_home(value):
            return value
        if value not in self.tensors:
            is_owner = self._shared[id(value)] == self._number
            self.tensors[value] = value if is_owner else copy_to_device(value, self._device, value.dtype)
        return self.tensors[value]

    def _own_module(self, module: nn.Module) -> nn.Module:
        if module not in self.modules:
            self.modules[module] = copy = object.__new__(type(module))
            # Bypass __init__ and __setattr__ of the class, whose arguments and effects are unknown.
            vars(copy).update(vars(module), _compiled_call_impl=None)  # the compiled call is bound to ``module``
            for kind in _KINDS:
                vars(copy)[kind] = entries = {name: self._own(value) for name, value in vars(module)[kind].items()}
                for name, value in entries.items():
                    self._expect_guest(entries, name, value)
        return self.modules[module]

    def _is_home(self, value: Any) -> bool:
        """Return whether ``value`` is a parameter on the host, which a guest replaces while the stage is loaded."""
        return self._offloaded is not None and isinstance(value, nn.Parameter)

    def _expect_guest(self, entries: dict[str, Any], name: str, value: Any) -> None:
        if self._is_home(value):
            assert self._offloaded is not None
            self.tensors[value] = self._offloaded.guest(value)
            self._offloaded.swaps.append((entries, name, value))


_KINDS = ("_parameters", "_buffers", "_modules")


def _entries(module: nn.Module) -> list[dict[str, Any]]:
    return [vars(module)[kind] for kind in _KINDS]


def _state(value: Any) -> Any:
    """Return the storage and version of a tensor; None for anything else."""
    if not isinstance(value, Tensor) or is_lazy(value):
        return None
    if hasattr(value, "_gpipe_is_guest"):  # its storage changes with each load
        return 0, version(value)
    return storage_id(value), version(value)


def copy_to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a leaf like ``tensor`` on ``device``, in its memory if possible; an untrained one there is not copied."""
    # A separate leaf, so that its gradient is separate from the owner's gradient.
    there = (tensor.detach() if _is_trained(tensor) else tensor).to(device, dtype, non_blocking=_is_pinned(tensor))
    if there is tensor:
        return tensor
    if issubclass(type(tensor), nn.Parameter):
        own = there.as_subclass(type(tensor))
    elif isinstance(tensor, nn.Parameter):  # a custom tensor that was made a parameter
        own = nn.Parameter(there, tensor.requires_grad)
    else:
        own = there
    # Layers may read attributes. Existing ones are kept, since the attributes of a wrapper subclass may hold its data.
    vars(own).update({**vars(tensor), **vars(own)})
    return own.requires_grad_() if _is_trained(tensor) else own


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and type(tensor) is nn.Parameter and tensor.is_pinned()


def _is_trained(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()
