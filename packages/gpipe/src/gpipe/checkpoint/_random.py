"""Random numbers that depend on the seed only, although stages draw at the same time and forwards are repeated.

If stages drew from the one generator of the CPU, their numbers would depend on timing. So operations that draw are
intercepted: every layer draws from a generator of its own for each micro-batch. Its seed is made of one number, which a
run takes from the process's generator when the first of its layers draws, and of the positions of the layer in the
model and of the micro-batch in the mini-batch, whatever the partition. The state of a layer's own generators is
restored for a recomputation, as is that of an accelerator's generator, which one worker uses.

On the CPU, layers that draw from the process's generator, such as after ``torch.manual_seed``, or draw again in a
backward, as in ``torch.utils.checkpoint``, are refused when they draw.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from .._current import current
from .._forks import fork_lock
from .._torch import OpOverload, backward_id
from ._device_generator import DeviceGenerator
from ._operations import Interception, device_of, drops_nothing, with_generator

PROCESS: Final = torch.default_generator
"""The generator of the process, from which torch draws on the CPU unless it is given another one."""

process_lock = fork_lock()
"""Held while the state of the process's generator is read and then changed."""

OUTSIDE: Final = -1
"""The layer of what is drawn in a cell outside of its layers: in hooks of a partition, or by a loss."""

_IN_BACKWARD = (
    "random numbers are drawn on the CPU in a backward of a pipeline, as torch.utils.checkpoint inside a layer does to "
    "repeat its forward, and hooks that add noise to gradients: they would be others than in the forward, or depend on "
    "timing. Let the pipe checkpoint the layer instead (GPipe(..., checkpoint='always')), switch its dropout off, or "
    "pass a generator of its own to the operation (torch.rand(..., generator=generator))"
)


def state_of(generator: torch.Generator) -> Tensor:
    """Its state, read from a copy.

    Torch holds the lock of a generator while it makes the result, and Python before 3.12 may collect garbage then.
    Freeing a tensor lets another thread run, which may wait for that lock and never let this one go on. Nobody waits
    for the lock of a copy, and no garbage is collected while one is made.
    """
    return generator.clone_state().get_state()


class RunRNG:
    """The random numbers of one run.

    Args:
        agreed: the number :attr:`seed`, if several processes have agreed on it.

    Attributes:
        drew: whether a layer has drawn any.
        seeds: those that the process's generator had before forwards and backwards.
    """

    def __init__(self, agreed: int | None = None) -> None:
        self.drew = False
        self._agreed = agreed
        self._lock = threading.Lock()
        # A pipe inside a layer of another one draws from that layer's numbers, which the recomputation repeats.
        self._around = current.work.rng
        self._in_backward = current.work.step is not None and in_backward()
        self._states: list[Tensor] = []
        self.seeds: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """Before forwards or backwards, while no layer computes: note the state of the process's generator."""
        self._states.append(state_of(PROCESS))
        self.seeds.add(PROCESS.initial_seed())

    def settle(self) -> None:
        """After forwards or backwards, while no layer computes: give the process's generator the state it should have.

        Two layers that set its state for a moment at the same time, as ``torch.utils.checkpoint`` does, leave an
        earlier one.
        """
        *earlier, last = self._states
        if not earlier:
            return
        with process_lock:
            now = state_of(PROCESS)
            # A state of before was put back late; any other is the wish of a layer or of the caller.
            if not torch.equal(now, last) and any(torch.equal(now, state) for state in earlier):
                PROCESS.set_state(last)

    @property
    def seed(self) -> int:
        self.drew = True
        if self._agreed is not None:
            return self._agreed
        # The first draws of several stages may come at the same time, and a run takes one number.
        with self._lock:
            return self._seed

    @cached_property
    def _seed(self) -> int:
        if self._in_backward:
            raise RuntimeError(_IN_BACKWARD)
        if self._around is not None:
            return _number(self._around.draw())
        with process_lock:
            # By a copy: a layer of another thread may put back the state of before at any time, see settle().
            copy = PROCESS.clone_state()
            seed = _number(copy)
            self._states.append(copy.get_state())
            PROCESS.set_state(self._states[-1])
        return seed

    def is_seeded_again(self) -> bool:
        """Whether the process's generator has been seeded since the run began, with the seed that it had before."""
        # A state of before says nothing: torch.utils.checkpoint in another stage sets it for a moment.
        now = state_of(PROCESS)
        if any(torch.equal(now, state) for state in reversed(self._states)):
            return False
        return torch.equal(now, torch.Generator().manual_seed(PROCESS.initial_seed()).get_state())


class CellRNG:
    """The random numbers of the layers of one cell. They are the same in every forward of the cell.

    Args:
        first: the number of layers of the model before those of the cell.
        device: the device of the stage if the cell may be recomputed, else None.
        module: the partition, which sets :attr:`at`; None for a loss.

    Attributes:
        microbatch: that of the cell. Where nothing is recomputed, the cells of a stage use one object in turn.
        at: the layer that computes now, counted from ``first``, or :data:`OUTSIDE`.
    """

    __slots__ = ("_device", "_drawn", "_first", "_generators", "_others", "_run", "at", "microbatch", "module")

    def __init__(
        self,
        run: RunRNG,
        microbatch: int,
        first: int,
        device: torch.device | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self._run = run
        self.microbatch = self._drawn = microbatch
        self._first = first
        self._generators: dict[int, torch.Generator] = {}
        self._others: dict[int, tuple[torch.Generator, Tensor]] = {}
        self._device = None if device is None else DeviceGenerator(device)
        self.at = OUTSIDE
        self.module = module

    @property
    def _generator(self) -> torch.Generator:
        """The generator of the current layer, on the CPU."""
        if self._drawn != self.microbatch:
            self._drawn = self.microbatch
            self._generators.clear()
        if self.at not in self._generators:
            # Asked once for each generator, since comparing states takes longer than a small draw; of another seed
            # draw() has asked.
            if self._run.is_seeded_again():
                raise self._seeds()
            self._generators[self.at] = torch.Generator().manual_seed((self._run.seed + self._number) % 2**32)
        return self._generators[self.at]

    @property
    def _number(self) -> int:
        """No two layers and micro-batches of a run share it: generators for the CPU use 32 bits of a seed."""
        # By the number of the layer in the model, and not of the stage: numbers do not depend on the balance.
        k = self._first + max(self.at, 0)
        return self.microbatch << 16 | 2 * k + (self.at != OUTSIDE)

    def draw(self) -> torch.Generator:
        """The generator from which to draw now; RuntimeError if a layer has seeded that of the process."""
        # Asked for each draw, since it is cheap.
        if PROCESS.initial_seed() not in self._run.seeds:
            raise self._seeds()
        return self._generator

    def draw_on(self, device: torch.device) -> None:
        """Before an operation draws on another ``device`` than the CPU, whose state :meth:`repeated` restores."""
        if self._device is not None:
            self._device.expect_repeats(device)

    def saw(self, generator: torch.Generator) -> None:
        """Remember the state of a layer's own generator before the cell first draws from it."""
        if self._device is not None and _identity(generator) not in self._others:
            self._others[_identity(generator)] = generator, state_of(generator)

    def again(self, device: torch.device) -> CellRNG:
        """The same random numbers, for layers of the cell on ``device`` that are computed again apart from others."""
        return CellRNG(self._run, self.microbatch, self._first, device, self.module)

    def forget(self) -> None:
        self._generators.clear()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """A context for a recomputation, in which this thread draws the numbers of the forward."""
        assert self._device is not None
        others, self._others = [*self._others.values()], {}
        # The next forward of the layer goes on from here, as if nothing had been drawn again.
        now = [(generator, state_of(generator)) for generator, _ in others]
        _set_states(others)
        try:
            with self._device.rewound():
                yield
        finally:
            _set_states(now)

    def _seeds(self) -> RuntimeError:
        names = [] if self.module is None else [*self.module._modules]
        place = f"layer {names[self.at]!r}" if names and self.at != OUTSIDE else "loss_fn or a hook of a partition"
        return RuntimeError(
            f"{place} draws random numbers on the CPU after torch's generator was given another seed or state in this "
            "run (torch.manual_seed, fork_rng, set_rng_state), by it or by another layer. In a pipeline stages compute "
            "at the same time, and no layer draws from that generator. Draw from one that belongs to the layer: "
            "torch.rand(..., generator=generator)"
        )


def in_backward() -> bool:
    # The backward of a whole pipe may compute in a backward of the caller; that one has begun before.
    return backward_id() != current.work.graph_task


def _draw(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an operation that draws, with the random numbers of the current layer."""
    cell: Any = current.work.rng
    own = kwargs.get("generator")
    if drops_nothing(operation, args):
        return operation(*args, **kwargs)
    # A layer draws from a generator that it has itself, which nobody else uses at the same time.
    if own is not None and _identity(own) != _identity(PROCESS):
        if cell is not None:
            cell.saw(own)
        return operation(*args, **kwargs)
    device = device_of(args, kwargs)
    if device.type != "cpu":
        if cell is not None:
            cell.draw_on(device)
        return operation(*args, **kwargs)
    # A recomputation inside of a backward that a layer has begun: its forward is over, and so are its numbers.
    if in_backward():
        raise RuntimeError(_IN_BACKWARD)
    if cell is None:
        return operation(*args, **kwargs)
    call = with_generator(operation)
    if call is None:
        raise RuntimeError(
            f"{operation} draws random numbers on the CPU and takes no generator, so that its numbers would depend on "
            "timing; give the operation an argument `Generator? generator=None`, or draw in the layer and pass it the "
            "numbers"
        )
    return call(*args, **{**kwargs, "generator": cell.draw()})


interception = Interception(_draw)
"""On threads that are intercepted, layers draw from the numbers of their cell."""


def _identity(generator: torch.Generator) -> int:
    """Which generator it is: intercepted operations get a new Python object for it each time."""
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def _number(generator: torch.Generator) -> int:
    return int(torch.randint(2**32, (), device="cpu", generator=generator))


def next_seed() -> int:
    """The seed that a run would take now; the generator does not change."""
    return _number(PROCESS.clone_state())


def take_seed() -> None:
    """Change the process's generator as a run that draws does."""
    with process_lock:
        _number(PROCESS)


def _set_states(states: Sequence[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)
