"""Parameters of a stage on the host, and the copies on the device that the stage uses.

Between its load and its unload, a stage holds a **guest** of each parameter: a leaf on its device. A guest remains the
same tensor throughout, because graphs refer to it, but its memory is allocated by a load and freed by an unload::

    host       home --x                                 x--> gradient
    inward            \\--copy--x           x--free
    stage                       \\--computes/
    outward                                 \\--copy--/

Loads allocate on a single stream per device, so that a load reuses the memory of earlier unloads, and waits for the
computations that read it. Source: FSDP resizes the storages of its flat parameters in the same way.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streams import (
    AbstractEvent,
    AbstractStream,
    CPUStream,
    new_stream,
    record_event,
    record_stream,
    use_stream,
    wait_event,
)

from .._cached_property import cached_property
from .._torch import count_storage_uses
from ..transport._copy import allocate_pinned_like, can_pin, to_host
from ..values._leaves import storage_id, version

_log = logging.getLogger("gpipe")

LeafGradient = tuple[Tensor, Tensor]
"""A leaf and its gradient."""

Offload = bool | torch.dtype
"""True if parameters are on the host; or the dtype of their copies, if it differs."""


class HostLink(NamedTuple):
    """The streams of a device that copy parameters from the host, and gradients to it."""

    inward: AbstractStream
    outward: AbstractStream

    @classmethod
    def of(cls, device: torch.device) -> HostLink:
        return cls(new_stream(device), new_stream(device))


class Guest(NamedTuple):
    """A copy of a parameter on the device of a stage.

    Attributes:
        home: the parameter, on the host.
        leaf: the copy.
        parts: the tensors whose memory is loaded. A subclass may consist of several.
        sizes: the bytes of their storages, which may have gaps.
        alone: the use count of the memory of ``parts`` if there are no other views of it.
        state: identifies the data of ``home``, if the copy holds more than ``parts``.
    """

    home: Tensor
    leaf: Tensor
    parts: Sequence[Tensor]
    sizes: Sequence[int]
    alone: int
    state: Any

    @classmethod
    def of(cls, home: Tensor, device: torch.device, dtype: torch.dtype, state: Any) -> Guest:
        leaf = _leaf(home, device, dtype)
        parts = [*_parts(leaf)]
        guest = cls(home, leaf, parts, [part.untyped_storage().nbytes() for part in parts], 0, state)
        guest.free()
        guest.settle()
        return guest._replace(alone=guest.uses())

    def uses(self) -> int:
        return sum(map(count_storage_uses, self.parts))

    def load(self) -> None:
        for part, size in zip(self.parts, self.sizes, strict=True):
            if part.untyped_storage().nbytes() < size:  # several parts may have one storage
                part.untyped_storage().resize_(size)
        for source, part in zip(_parts(self.home), self.parts, strict=True):
            part.copy_(_convert(source, part), non_blocking=True)
        if self.settles:
            self.leaf.data = self.parts[0]

    def settle(self) -> None:
        """Let the copy use the memory of the parameter, for code that still refers to it."""
        if self.settles:
            self.leaf.data = self.home.data

    @property
    def settles(self) -> bool:
        """True if the copy can use the memory of the parameter."""
        home, part = self.home, self.parts[0]
        is_plain = type(home) is nn.Parameter and part.dtype == home.dtype
        return is_plain and _are_compatible(home.device.type, part.device.type)

    def free(self) -> None:
        for part in self.parts:
            part.untyped_storage().resize_(0)


class Guests:
    """The guests of a stage, which are kept from run to run.

    Attributes:
        offload: the argument of the pipe, which determines the dtype of guests.
    """

    def __init__(self, offload: Offload = True) -> None:
        self.offload = offload
        self._known: dict[int, Guest] = {}

    def of(self, home: Tensor, device: torch.device) -> Guest:
        """Return the guest of ``home``, without memory of its own."""
        known, state = self._known.get(id(home)), _state(home)
        if known is None or known.home is not home or known.state != state:
            with torch.inference_mode(False):  # a later run may train
                known = self._known[id(home)] = Guest.of(home, device, dtype_of_guest(home, self.offload), state)
        # A subclass may keep data in attributes, and the copy has its own.
        own = {} if type(home) is nn.Parameter else vars(known.leaf)
        vars(known.leaf).update({**vars(home), **own, "_gpipe_is_guest": True})  # see gpipe.checkpoint._state
        return known

    def keep(self, homes: Collection[Tensor]) -> None:
        """Drop the guests of parameters that the stage no longer has."""
        ids = {*map(id, homes)}
        self._known = {key: guest for key, guest in self._known.items() if key in ids}

    def forget(self, guest: Guest) -> None:
        """Make a new guest for the next run, because a view outside the pipe uses the memory of this one."""
        if self._known.get(id(guest.home)) is guest:
            del self._known[id(guest.home)]
            _log.warning(
                "a layer keeps a view of a parameter of shape %s, which is on the host (offload=True); the view does "
                "not see later updates of the parameter, and its memory on the device is not freed",
                tuple(guest.home.shape),
            )


def dtype_of_guest(home: Tensor, offload: Offload) -> torch.dtype:
    """Return the dtype of the copy that stages use instead of ``home``."""
    if isinstance(offload, torch.dtype) and type(home) is nn.Parameter and home.is_floating_point():
        return offload
    return home.dtype


@cache
def _are_compatible(kind: str, other: str) -> bool:
    """Return whether a tensor on a device of one type can be given data on another; torch allows CPUs and CUDA."""
    try:
        torch.empty(0, device=kind).data = torch.empty(0, device=other)
    except RuntimeError:
        return False
    return True


def _leaf(home: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    with torch.no_grad():
        if type(home) is nn.Parameter:
            leaf: Tensor = nn.Parameter(torch.empty_like(home, device=device, dtype=dtype), home.requires_grad)
        else:
            # Its attributes, such as scales, are copied as well, and remain on the device.
            source = home.detach() if home.requires_grad else home
            there = source.to(device)
            if there is source or device.type == home.device.type:
                there = _copy(source)
            leaf = there if isinstance(there, nn.Parameter) else nn.Parameter(there, home.requires_grad)
    return leaf.requires_grad_(home.requires_grad)


def _convert(source: Tensor, part: Tensor) -> Tensor:
    """Return ``source`` in the dtype of ``part``, in pinned memory, because a device copies but does not convert."""
    if source.dtype == part.dtype or not can_pin(part.device.type):
        return source
    return allocate_pinned_like(source, part.dtype).copy_(source)


def _copy(tensor: Tensor) -> Tensor:
    try:
        return copy.deepcopy(tensor)
    except RuntimeError:  # torch leaves copies of some subclasses to these
        return tensor.clone().as_subclass(type(tensor))


def _state(home: Tensor) -> Any:
    kind = home.shape, home.dtype, home.stride(), home.requires_grad
    if type(home) is nn.Parameter:
        return kind
    own = [id(value) for value in vars(home).values()]
    inner = [id(each) for value in vars(home).values() for each in getattr(value, "__dict__", {}).values()]
    return kind, version(home), [part.data_ptr() for part in _parts(home)], own, inner


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that hold the data of ``tensor``, with version counters of their own."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        data = tensor.data
        yield data if type(data) is Tensor else data.as_subclass(Tensor)


class Offloaded:
    """The guests of one stage in one run.

    Args:
        guests: the guests of the stage.
        link: the streams of its device.
        compute: the stream of its computations.

    Attributes:
        swaps: the entries in the dicts of modules that refer to a guest while the stage is loaded.
        every_home: the parameters of all stages.
    """

    def __init__(self, guests: Guests, device: torch.device, link: HostLink, compute: AbstractStream) -> None:
        self._known, self._device, self._link, self._compute = guests, device, link, compute
        self._guests: dict[Tensor, Guest] = {}
        self.swaps: list[tuple[dict[str, Any], str, Tensor]] = []
        self._versions: list[int] = []
        self.every_home: Collection[Tensor] = ()
        self._is_loaded = False
        self._ready: AbstractEvent = None
        self._is_awaited = True
        self._gradients: list[LeafGradient] = []
        self._sent: AbstractEvent = None

    def guest(self, home: Tensor) -> Tensor:
        """Return the leaf that the stage uses instead of ``home``."""
        if home not in self._guests:
            self._guests[home] = self._known.of(home, self._device)
        return self._guests[home].leaf

    def find(self, home: Tensor) -> Tensor | None:
        """Return the guest of ``home``; None if the stage has none."""
        return self._guests[home].leaf if home in self._guests else None

    @property
    def offload(self) -> Offload:
        """The argument of the pipe."""
        return self._known.offload

    @property
    def homes(self) -> list[Tensor]:
        return [*self._guests]

    @property
    def leaves(self) -> list[Tensor]:
        return [guest.leaf for guest in self._guests.values()]

    def own(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, or a clone if it is a view of a guest, whose memory will be freed."""
        if storage_id(tensor) not in self.storages:
            return tensor
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def expect_own(self, leaves: Sequence[Tensor]) -> None:
        """Raise RuntimeError if ``leaves`` of a graph of this stage include parameters that it does not load."""
        own = {*map(id, self.leaves)}
        for leaf in leaves:
            if leaf in self.every_home or (hasattr(leaf, "_gpipe_is_guest") and id(leaf) not in own):
                raise RuntimeError(
                    f"a layer uses a parameter of shape {tuple(leaf.shape)} that belongs to another partition, and is "
                    "not loaded with its own (offload=True); let the layer have the parameter too, as in "
                    "head.weight = embedding.weight"
                )

    @cached_property
    def storages(self) -> set[int]:
        """The storages of the copies."""
        return {storage_id(part) for guest in self._guests.values() for part in guest.parts}

    def load(self) -> None:
        """Queue the copies from the host, and let the modules hold the guests.

        Raises:
            RuntimeError: a parameter has changed since the first load of this run.
        """
        versions = [*map(version, self._guests)]
        if versions != (self._versions or versions):
            raise RuntimeError(
                "a parameter was changed in place between the forward and the backward of a pipe; change it after "
                "backward() (optimizer.step() comes last)"
            )
        self._versions = versions
        self._known.keep(self._guests)
        with use_stream(self._link.inward), torch.no_grad(), torch.inference_mode(False):
            for guest in self._guests.values():
                guest.load()
        self._ready, self._is_awaited = record_event(self._link.inward), False
        for entries, name, home in self.swaps:
            entries[name] = self._guests[home].leaf
        self._is_loaded = True

    def arrive(self) -> None:
        """Make the computations of the stage wait for the last load."""
        if not self._is_awaited:
            self._is_awaited = True
            wait_event(self._compute, self._ready)

    def unload(self, *, ends: bool) -> None:
        """Free the memory of the guests once the queued computations are complete.

        Args:
            ends: whether the stage computes nothing more in this run. Its gradients are then sent to the host, and no
                graph needs the guests.
        """
        if not self._is_loaded:
            return
        self._is_loaded = False
        done = record_event(self._compute)
        wait_event(self._link.inward, done)
        if ends:
            self._send_gradients(done)
        with torch.inference_mode(False):
            for guest in self._guests.values():
                guest.settle()
                if ends and guest.uses() > guest.alone:
                    self._known.forget(guest)
                else:
                    guest.free()
        for entries, name, home in self.swaps:
            if entries.get(name) is self._guests[home].leaf:  # a layer may have assigned something else
                entries[name] = home

    def _send_gradients(self, done: AbstractEvent) -> None:
        wait_event(self._link.outward, done)
        with use_stream(self._link.outward), torch.no_grad():
            for guest in self._guests.values():
                gradient, guest.leaf.grad = guest.leaf.grad, None
                if gradient is not None:
                    record_stream(gradient, self._link.outward)
                    self._gradients.append((guest.leaf, to_host(gradient)))
        self._sent = record_event(self._link.outward)

    def take(self) -> list[LeafGradient]:
        """Return the gradients of guests, on the host, after they have arrived there."""
        wait_event(CPUStream, self._sent)
        gradients, self._gradients = self._gradients, []
        return gradients

    def leave(self) -> None:
        """Unload the stage after a failure, and wait until no copy reads the host's memory."""
        self.unload(ends=False)
        wait_event(CPUStream, self._ready)


def pin(parameters: Sequence[Tensor]) -> None:
    """Move the data of ``parameters`` into pinned memory, which a device reads without help of the host."""
    for parameter in parameters:
        if type(parameter) is nn.Parameter and parameter.device.type == "cpu" and not parameter.is_pinned():
            parameter.data = parameter.data.pin_memory()
