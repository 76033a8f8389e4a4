"""Reproducible random numbers, although stages run concurrently and forwards are recomputed.

If stages drew from the single CPU generator, their numbers would depend on timing. So random operations are
intercepted, and every layer draws from a separate generator per micro-batch. Its seed combines the run's seed with the
indices of the layer in the model and of the micro-batch in the mini-batch, so that it does not depend on the partition.
The run's seed is drawn from the default generator when a layer first draws. The state of a layer's own generators is
restored for a recomputation, like the state of an accelerator's generator, which only one worker uses.

On the CPU, a layer raises RuntimeError when it draws after seeding the default generator, for example by
``torch.manual_seed``, or when it draws in a backward, as ``torch.utils.checkpoint`` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from streams import waiting

from .._current import current
from .._forks import fork_lock
from .._torch import OpOverload, backward_id
from ._device_generator import DeviceGenerator
from ._operations import Interception, drops_nothing, find_device, with_generator

PROCESS: Final = torch.default_generator
"""The default generator: torch draws from it on the CPU unless an operation gets a different one."""

process_lock = fork_lock()
"""Held while the state of the default generator is read and then changed."""

OUTSIDE: Final = -1
"""The layer index for random numbers that a cell draws outside its layers: in hooks of a partition, or in a loss."""

_IN_BACKWARD = (
    "random numbers are drawn on the CPU in a backward of a pipeline, as torch.utils.checkpoint inside a layer does to "
    "repeat its forward, and hooks that add noise to gradients: they would be others than in the forward, or depend on "
    "timing. Let the pipe checkpoint the layer instead (GPipe(..., checkpoint='always')), switch its dropout off, or "
    "pass a generator of its own to the operation (torch.rand(..., generator=generator))"
)


def get_generator_state(generator: torch.Generator) -> Tensor:
    """Return the state of a generator, read from a copy.

    Torch holds the generator's lock while it creates the result, and Python before 3.12 may then collect garbage.
    Freeing a tensor lets another thread run, which may wait for the lock and cause a deadlock. No thread waits for the
    lock of a copy, and creating a copy collects no garbage.
    """
    return generator.clone_state().get_state()


class RunRNG:
    """The random numbers of one run.

    Args:
        agreed: the value of :attr:`seed`, if several processes have agreed on it.

    Attributes:
        drew: whether a layer has drawn random numbers.
        advanced: the names of the generators of Python and NumPy that the run has advanced.
        seeds: the seeds of the default generator before the forwards and before the backwards.
    """

    def __init__(self, agreed: int | None = None) -> None:
        self.drew = False
        self.advanced = set[str]()
        self._agreed = agreed
        self._lock = waiting.Lock()
        self._seed: int | None = None
        # A pipe inside a layer of another pipe draws from that layer's numbers, which the recomputation repeats.
        self._around = current.work.rng
        self._in_backward = current.work.step is not None and in_backward()
        self._states: list[Tensor] = []
        self.seeds: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """Record the state of the default generator before forwards or backwards, while no layer computes."""
        self._states.append(get_generator_state(PROCESS))
        self.seeds.add(PROCESS.initial_seed())

    def settle(self) -> None:
        """Correct the state of the default generator after forwards or backwards, while no layer computes.

        If two layers save and restore its state at the same time, as ``torch.utils.checkpoint`` does, an earlier state
        may remain.
        """
        *earlier, last = self._states
        if not earlier:
            return
        with process_lock:
            now = get_generator_state(PROCESS)
            # An earlier state was restored too late. Any unknown state was set deliberately by a layer or the caller.
            if not torch.equal(now, last) and any(torch.equal(now, state) for state in earlier):
                PROCESS.set_state(last)

    @property
    def seed(self) -> int:
        self.drew = True
        if self._agreed is not None:
            return self._agreed
        # Several stages may draw for the first time at once, but a run takes only one number.
        with self._lock:
            # Not a cached_property, whose lock all runs share before Python 3.12. A nested run would hold it while it
            # waits for the outer run, whose other stages may wait for it.
            if self._seed is None:
                self._seed = self._take_seed()
            return self._seed

    def _take_seed(self) -> int:
        if self._in_backward:
            raise RuntimeError(_IN_BACKWARD)
        if self._around is not None:
            return _number(self._around.draw())
        with process_lock:
            # From a copy, because a layer on a different thread may restore an earlier state at any time, see settle().
            copy = PROCESS.clone_state()
            seed = _number(copy)
            self._states.append(copy.get_state())
            PROCESS.set_state(self._states[-1])
        return seed

    def is_seeded_again(self) -> bool:
        """Return whether the default generator was seeded since the run began, with the same seed as before."""
        # Earlier states do not count: torch.utils.checkpoint in another stage temporarily sets them.
        now = get_generator_state(PROCESS)
        if any(torch.equal(now, state) for state in reversed(self._states)):
            return False
        return torch.equal(now, torch.Generator().manual_seed(PROCESS.initial_seed()).get_state())


class CellRNG:
    """The random numbers of the layers of one cell. They are the same in every forward of the cell.

    Args:
        first: the number of layers of the model before the layers of the cell.
        device: the device of the stage if the cell may be recomputed, else None.
        module: the partition, which sets :attr:`at`; None for a loss.

    Attributes:
        microbatch: the micro-batch of the cell. Without recomputation, the cells of a stage share one object in turn.
        at: the index of the current layer, relative to ``first``, or :data:`OUTSIDE`.
        draws: the number of random operations so far.
    """

    __slots__ = ("_device", "_drawn", "_first", "_generators", "_others", "_run", "at", "draws", "microbatch", "module")

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
        self.draws = 0
        self.module = module

    @property
    def _generator(self) -> torch.Generator:
        """The CPU generator of the current layer."""
        if self._drawn != self.microbatch:
            self._drawn = self.microbatch
            self._generators.clear()
        if self.at not in self._generators:
            # Checked once per generator, because comparing states takes longer than a small draw. A different seed was
            # already detected in draw().
            if self._run.is_seeded_again():
                raise self._seeds()
            self._generators[self.at] = torch.Generator().manual_seed((self._run.seed + self._number) % 2**32)
        return self._generators[self.at]

    @property
    def _number(self) -> int:
        """A number unique to the layer and micro-batch in a run. CPU generators use only 32 bits of a seed."""
        # The layer's index in the model, not in the stage, so that numbers do not depend on the balance.
        k = self._first + max(self.at, 0)
        return self.microbatch << 16 | 2 * k + (self.at != OUTSIDE)

    def draw(self) -> torch.Generator:
        """Return the generator to draw from; RuntimeError if a layer has seeded the default generator."""
        self.draws += 1
        # Checked for each draw, because it is cheap.
        if PROCESS.initial_seed() not in self._run.seeds:
            raise self._seeds()
        return self._generator

    def draw_on(self, device: torch.device) -> None:
        """Check, before an operation draws on a non-CPU ``device``, that :meth:`repeated` restores its generator."""
        self.draws += 1
        if self._device is not None:
            self._device.expect_repeats(device)

    def saw(self, generator: torch.Generator) -> None:
        """Record the state of a layer's own generator before the cell first draws from it."""
        self.draws += 1
        if self._device is not None and _identity(generator) not in self._others:
            self._others[_identity(generator)] = generator, get_generator_state(generator)

    def fork(self, device: torch.device) -> CellRNG:
        """Return the same random numbers for layers of the cell on ``device`` that are recomputed separately."""
        return CellRNG(self._run, self.microbatch, self._first, device, self.module)

    def forget(self) -> None:
        self._generators.clear()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Let this thread draw the numbers of the forward again, for a recomputation."""
        assert self._device is not None
        others, self._others = [*self._others.values()], {}
        # The next forward of the layer continues from these states, as if the recomputation had drawn nothing.
        now = [(generator, get_generator_state(generator)) for generator, _ in others]
        try:
            _set_states(others)
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
    # A backward of the caller that runs the pipe's own backward has begun before, and does not count.
    return backward_id() != current.work.graph_task


def _draw(operation: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Execute a random operation with the random numbers of the current layer."""
    cell: Any = current.work.rng
    own = kwargs.get("generator")
    if drops_nothing(operation, args):
        return operation(*args, **kwargs)
    # A layer's own generator is used by no other thread at the same time.
    if own is not None and _identity(own) != _identity(PROCESS):
        if cell is not None:
            cell.saw(own)
        return operation(*args, **kwargs)
    device = find_device(args, kwargs)
    if device.type != "cpu":
        if cell is not None:
            cell.draw_on(device)
        return operation(*args, **kwargs)
    # In a backward begun inside a layer, for example a recomputation, the numbers of the layer's forward are over.
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
"""Lets layers draw from the numbers of their cell, on threads that set it."""


def _identity(generator: torch.Generator) -> int:
    """Identify a generator, because intercepted operations receive a new Python object for it on each call."""
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def _number(generator: torch.Generator) -> int:
    return int(torch.randint(2**32, (), device="cpu", generator=generator))


def next_seed() -> int:
    """Return the seed that a run would draw now, without changing the generator."""
    return _number(PROCESS.clone_state())


def take_seed() -> None:
    """Advance the default generator as a run that draws random numbers does."""
    with process_lock:
        _number(PROCESS)


def _set_states(states: Sequence[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)
