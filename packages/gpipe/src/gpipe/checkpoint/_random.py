"""Random numbers that depend on the seed only, although stages draw at the same time and forwards are repeated.

The CPU has one generator for the whole process. If stages drew from it, their numbers would depend on timing, and a
recomputation could not get the same numbers without changing those of others. So every layer draws from a generator of
its own for each micro-batch. Its seed is made of one number, which a run takes from the process's generator when the
first of its layers draws, and of the positions of the layer in the model and of the micro-batch in the mini-batch; it
does not depend on the partition. The state of a layer's own generators is restored for a recomputation.

An accelerator has a generator of its own, used by one worker: there it is enough to restore its state.

Layers that do not draw cost nothing: the first run in each training mode shows which layers draw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from streams import DispatchMode

from .._current import current, setting
from ._device_generator import DeviceGenerator
from ._interception import Interception, draws
from ._served import PROCESS, Served, are_one, borrowing, can_serve, in_checkpoint, is_process, lent


class RunRNG:
    """The random numbers of one run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A pipe inside a layer of another one draws from that layer's numbers, which the recomputation repeats.
        self._around = current.rng if current.rng is not None and current.rng.follows else None
        self._seed: int | None = None
        with borrowing:
            self._state = PROCESS.get_state()

    @property
    def seed(self) -> int:
        """The one number that the run takes."""
        with self._lock:
            if self._seed is None:
                source = PROCESS if self._around is None else self._around.draw()
                with setting(rng_paused=True), borrowing:
                    self._seed = int(torch.randint(2**32, (), device="cpu", generator=source))
                    self._state = PROCESS.get_state()
            return self._seed

    def moved(self) -> bool:
        """Whether random numbers were drawn from the process's generator without a cell."""
        with self._lock, borrowing:
            return not torch.equal(self._state, PROCESS.get_state())


OUTSIDE: Final = -1
"""What is drawn in a cell outside of its layers: in hooks of a partition, or by a loss."""

_NOTHING: AbstractContextManager[None] = nullcontext()
_CPU: Final = torch.device("cpu")


class CellRNG:
    """The random numbers of the layers of one cell. They are the same in every forward of the cell.

    Args:
        run: the run, which has the seed.
        microbatch: the number of the micro-batch.
        first: the number of layers of the model before those of the cell.
        device: the device of the stage.
        drawing: the layers whose draws are watched, counted from ``first``. With :data:`OUTSIDE`, all draws are
            watched.
        module: the partition, which calls :meth:`layer` around each of its layers.

    Attributes:
        drew: the layers that drew what only those who watch can repeat, on the CPU or from generators of their own, or
            that set torch's generator.
        drew_on_device: those that drew anything on an accelerator.
        asked: those that read or set torch's generator, as ``torch.utils.checkpoint`` does in order to draw the same
            numbers again; the backward may then draw too.
        served: whether they would get at their own instead. This costs time, so only layers that were seen to ask, or
            were not looked at yet, have it.
        intercepts: whether only operations that draw are looked at, and no others, which costs nothing. Those of torch
            are known, and others from a run in which all were looked at.
        follows: whether draws are watched now.
    """

    __slots__ = (
        "_at",
        "_device",
        "_drawing",
        "_first",
        "_generators",
        "_microbatch",
        "_others",
        "_run",
        "_seed",
        "asked",
        "drew",
        "drew_on_device",
        "follows",
        "intercepts",
        "module",
        "served",
    )

    def __init__(
        self,
        run: RunRNG,
        microbatch: int,
        first: int,
        device: torch.device,
        drawing: Collection[int],
        module: nn.Module | None = None,
    ) -> None:
        self._run = run
        self._microbatch = microbatch
        self._first = first
        self._drawing = drawing
        self._at = OUTSIDE
        self._generators: dict[int, torch.Generator] = {}
        self._others: list[tuple[torch.Generator, Tensor]] = []
        self._device = DeviceGenerator(device)
        self.module = module
        self.drew: set[int] = set()
        self.asked: set[int] = set()
        self.drew_on_device: set[int] = set()
        self.served = False
        self.intercepts = False
        self.follows = False

    @property
    def watches(self) -> bool:
        """Whether every draw is seen."""
        return OUTSIDE in self._drawing and not self.intercepts

    @property
    def generator(self) -> torch.Generator:
        """The generator of the current layer, on the CPU."""
        if self._at not in self._generators:
            self._generators[self._at] = torch.Generator().manual_seed((self._run.seed + self._number) % 2**32)
        return self._generators[self._at]

    @property
    def _number(self) -> int:
        """No two layers and micro-batches of a run share it: generators for the CPU use 32 bits of a seed."""
        k = self._first + max(self._at, 0)
        return self._microbatch << 16 | 2 * k + (self._at != OUTSIDE)

    def draw(self) -> torch.Generator:
        """The generator for an operation that draws on the CPU."""
        self.drew.add(self._at)
        return self.generator

    def draw_on(self, device: torch.device) -> None:
        """Before an operation draws on another ``device`` than the CPU, whose state :meth:`repeated` puts back."""
        if current.checkpointing:
            self._device.expect_repeats(device)
        self.drew_on_device.add(self._at)

    def saw(self, generator: torch.Generator) -> None:
        """Remember the state of a layer's own generator before the cell first draws from it."""
        self.drew.add(self._at)
        with setting(rng_paused=True):
            known = any(are_one(generator, own) for own, _ in self._others)
        if not known:
            self._others.append((generator, generator.get_state()))

    def ask(self, changes: bool) -> torch.Generator:
        """What layers read, or set if it ``changes``, that mean torch's generator."""
        self.asked.add(self._at)
        if changes:
            self.drew.add(self._at)
        return self.generator

    def expect_served(self) -> None:
        """Before a draw: raise RuntimeError if layers have just begun to read or set torch's generator."""
        if not self.served and (self._is_seeded() or in_checkpoint()):
            self.asked.add(self._at)
            raise RuntimeError(
                "layers of this partition began to read or set torch's random generator (torch.manual_seed, fork_rng, "
                "set_rng_state, torch.utils.checkpoint) after their first forward in this training mode; run this "
                "mini-batch again: from now on the pipeline serves them"
                if can_serve()
                else "layers of this partition draw random numbers inside torch.utils.checkpoint, or seed torch's "
                "generator, which the pipeline cannot follow while a profiler written in C (cProfile, or "
                "torch.profiler with_stack) watches the thread; profile otherwise"
            )

    def _is_seeded(self) -> bool:
        """Whether layers have given torch's generator another seed."""
        # Without the lock first: other threads lend it one for a moment, but hardly ever the one that is expected.
        return PROCESS.initial_seed() != self._seed and _process_seed() != self._seed

    @contextmanager
    def drawn_from(self, *, served: bool, known: bool = False) -> Iterator[None]:
        """A context for the layers, in which draws on the CPU come from here.

        Args:
            served: see there.
            known: whether a run before has shown which layers draw, and with which operations.
        """
        before, current.rng = current.rng, self
        self.served = served and can_serve()
        self.intercepts = known and not self.served and _interception.ready()
        try:
            with self._followed() if OUTSIDE in self._drawing else _NOTHING:
                yield
        finally:
            current.rng = before
            if not self.asked:  # only then a backward goes on drawing
                self._generators.clear()

    def layer(self, k: int) -> AbstractContextManager[None]:
        """A context around a layer of the cell."""
        return self._at_layer(k) if k in self._drawing else _NOTHING

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """A context in which this thread draws the numbers of the forward again, on every device."""
        self._generators.clear()
        others, self._others = self._others, []
        now = [(generator, generator.get_state()) for generator, _ in others]
        _set_states(others)
        try:
            with self._device.rewound(), self.drawn_from(served=bool(self.asked), known=self.intercepts):
                yield
        finally:
            _set_states(now)

    def backward(self) -> AbstractContextManager[None]:
        """A context for the backward."""
        return self._in_backward() if self.asked else _NOTHING

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        # It is not known to which layer a part of a backward belongs. If it sets a seed before it draws, any generator
        # is right.
        with self.drawn_from(served=True), self._at_layer(min(self.asked)):
            yield

    @contextmanager
    def _at_layer(self, k: int) -> Iterator[None]:
        before, self._at = self._at, k
        try:
            with _NOTHING if self.follows else self._followed():
                yield
        finally:
            self._at = before

    @contextmanager
    def _followed(self) -> Iterator[None]:
        """A context in which every draw of this thread is seen."""
        self.follows = True
        self._seed = _process_seed()
        before, current.followed = current.followed, self
        try:
            with (
                _interception.switched(self.intercepts),
                _NOTHING if self.intercepts else _Draws(self).pushed(),
                Served(self.ask) if self.served else _NOTHING,
            ):
                yield
        finally:
            self.follows = False
            current.followed = before


class _Draws(DispatchMode):  # type: ignore[no-untyped-call]
    """Passes the generator of the current layer to every operation that draws."""

    def __init__(self, cell: CellRNG) -> None:
        super().__init__()
        self._cell = cell

    def __torch_dispatch__(
        self, operation: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not draws(operation):
            return operation(*args, **kwargs)
        _interception.add(operation)  # in the next run, if it is not among torch's own
        return _draw(self._cell, operation, args, kwargs)


def _draw_followed(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    followed: Any = current.followed
    return _draw(followed, operation, args, kwargs)


_interception = Interception(_draw_followed)


def _draw(cell: CellRNG, operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation that draws, with the random numbers of the current layer of ``cell``."""
    if current.rng_paused or _drops_nothing(operation, args):
        return operation(*args, **kwargs)
    own = kwargs.get("generator")
    if own is not None and not _is_process(own):
        cell.saw(own)
        return operation(*args, **kwargs)
    cell.expect_served()
    device = _device(args, kwargs)
    if device is not _CPU and device.type != "cpu":
        cell.draw_on(device)
        return operation(*args, **kwargs)
    with_generator = _with_generator(operation)
    if with_generator is not None:
        return with_generator(*args, **{**kwargs, "generator": cell.draw()})
    # No operation of torch on CPUs gets here, only operations of other libraries that take no generator.
    with lent(cell.draw()), setting(rng_paused=True):
        return operation(*args, **kwargs)


def _process_seed() -> int:
    with borrowing:
        return PROCESS.initial_seed()


def _set_states(states: Sequence[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)


def _is_process(generator: torch.Generator) -> bool:
    with setting(rng_paused=True):
        return is_process(generator)


def _drops_nothing(operation: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether this is a dropout in evaluation, or with probability 0."""
    return operation is torch.ops.aten.native_dropout.default and (args[2] is False or not args[0].numel())


def _native_dropout(
    input: Tensor,  # noqa: A002
    p: float,
    train: bool | None,
    *,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """``torch.native_dropout`` in training mode, by the operations that it consists of on a CPU."""
    keep = 1.0 - p
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(keep, generator=generator)
    return input.mul(mask.to(input.dtype).mul_(1.0 / keep if keep else 0.0)), mask


@cache
def _with_generator(operation: OpOverload) -> Callable[..., Any] | None:
    """What takes the same arguments and a generator: ``operation`` itself if it does, or another overload."""
    if operation is torch.ops.aten.native_dropout.default:
        return _native_dropout
    if _takes_generator(operation):
        return _as_method(operation)
    wanted = _arguments(operation) | {"generator"}
    packet = operation.overloadpacket
    overloads: list[OpOverload] = [getattr(packet, name) for name in packet.overloads()]
    return next((o for o in overloads if _takes_generator(o) and _arguments(o) == wanted), None)


def _as_method(operation: OpOverload) -> Callable[..., Any]:
    """``operation`` as a method of tensors if it is in place, as that of dropout is: Python calls methods faster."""
    name = operation._schema.name.removeprefix("aten::")
    method = getattr(torch._C.TensorBase, name, None) if name.endswith("_") else None
    if method is None:
        return operation

    def call(*args: Any, **kwargs: Any) -> Any:
        overridden = type(args[0]) is not Tensor or torch._C._len_torch_function_stack()
        return (operation if overridden else method)(*args, **kwargs)

    return call


def _arguments(operation: OpOverload) -> frozenset[object]:
    arguments = operation._schema.arguments
    return frozenset("generator" if a.name == "generator" else (a.name, str(a.type)) for a in arguments)


def _takes_generator(operation: OpOverload) -> bool:
    return "generator" in _arguments(operation)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if args and isinstance(args[0], Tensor) and "device" not in kwargs:
        return _CPU if args[0].is_cpu else args[0].device
    tensors = (value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    device = kwargs.get("device") or next(tensors, "cpu")
    return torch.device(device)
