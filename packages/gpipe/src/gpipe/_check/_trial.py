"""One run of a layer alone: what it gives, what it does to its input, and the gradients."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import Arguments

from ..checkpoint._device_generator import module_of
from ..skip import Skippable
from ..skip._store import Key, routed
from ..values._leaves import Activation, as_nonleaf, clone_leaves, versions

SEED = 20_041_911


class Signal(NamedTuple):
    """What goes into a layer: its argument, and the skips that it pops."""

    value: Any
    skips: dict[Key, Tensor | None]

    def activation(self) -> Activation:
        """All of it as one value."""
        return Activation((self.value, *self.skips.values()))

    def tensors(self) -> list[Tensor]:
        return list(self.activation().tensors)

    def replaced(self, tensors: Sequence[Tensor]) -> Signal:
        """The same with other tensors, in the order of :meth:`tensors`."""
        value, *skips = self.activation().with_tensors(tensors).value
        return Signal(value, dict(zip(self.skips, skips, strict=True)))


class Trial(NamedTuple):
    """What a forward showed, and what a backward starts from.

    Attributes:
        output: what it gave on: its return value, and the skips that it stashed; detached, but with requires_grad.
        drew: whether it used a generator of PyTorch.
        drew_elsewhere: whether it used Python's or NumPy's.
        in_place: whether it changed what went in.
        roots: the tensors of ``output``, with their graph.
        leaves: those that went in.
    """

    output: Signal
    drew: bool
    drew_elsewhere: bool
    in_place: bool
    roots: list[Tensor]
    leaves: list[Tensor]

    def backward(self, cotangents: Sequence[Tensor]) -> None:
        """Accumulate gradients in the parameters and in ``leaves``, from one gradient for each of ``roots``."""
        pairs = [(y, g) for y, g in zip(self.roots, cotangents, strict=True) if y.requires_grad]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]


def attempt(layer: nn.Module, signal: Signal) -> Trial:
    """Run the forward of ``layer``, with all generators in the same state as for every other attempt."""
    leaves = clone_leaves(signal.activation())
    entered = as_nonleaf(leaves)
    before = versions(entered)
    value, *skips = entered.value
    store = dict(zip(signal.skips, skips, strict=True))
    with seeded(layer) as generators, routed(store):
        output = call(layer, value)
        drew, drew_elsewhere = generators.drew(), generators.drew_elsewhere()
    given = Signal(output, {key: skip for key, skip in store.items() if key not in signal.skips})
    roots = given.tensors()
    detached = given.replaced([tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in roots])
    return Trial(detached, drew, drew_elsewhere, versions(entered) != before, roots, list(leaves.tensors))


def call(layer: nn.Module, value: Any) -> Any:
    """What ``layer`` makes of ``value``, which may stand for several arguments."""
    return layer(*value.args, **value.kwargs) if isinstance(value, Arguments) else layer(value)


def call_all(layers: nn.Sequential, value: Any) -> Any:
    """What ``layers`` make of ``value``, one after the other; unlike their container, the first takes several."""
    for layer in layers.children():
        value = call(layer, value)
    return value


def popped(layer: nn.Module) -> list[Key]:
    """The skips that modules of ``layer`` pop; some may come from other modules of it."""
    return [key for module in layer.modules() if isinstance(module, Skippable) for key in module.poppable()]


class Generators:
    """The generators of PyTorch, Python and NumPy, and whether they were used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch, self._python, self._numpy = _states(device), random.getstate(), _numpy_state()

    def drew(self) -> bool:
        return any(not torch.equal(a, b) for a, b in zip(self._torch, _states(self._device), strict=True))

    def drew_elsewhere(self) -> bool:
        numpy = _numpy_state()
        same = numpy is None or self._numpy is None or _plain(numpy) == _plain(self._numpy)
        return random.getstate() != self._python or not same

    def restore(self) -> None:
        torch.set_rng_state(self._torch[0])
        for state in self._torch[1:]:
            module_of(self._device).set_rng_state(state, self._device)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _states(device: torch.device) -> list[Tensor]:
    module = module_of(device)
    return [torch.get_rng_state()] if module is None else [torch.get_rng_state(), module.get_rng_state(device)]


def _numpy_state() -> Any:
    """The state of NumPy's global generator; None if nobody has imported it."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _plain(state: Any) -> tuple[Any, ...]:
    return (state[1].tobytes(), *state[2:])


@contextmanager
def seeded(layer: nn.Module) -> Iterator[Generators]:
    """PyTorch's generators begin at a fixed seed; afterwards all are as they were."""
    tensor = next(iter((*layer.parameters(), *layer.buffers())), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    before = Generators(device)
    torch.manual_seed(SEED)
    try:
        yield Generators(device)
    finally:
        before.restore()
