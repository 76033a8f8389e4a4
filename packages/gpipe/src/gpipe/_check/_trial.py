"""One run of a layer alone: what it gives, what it does to its input, and the gradients."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import Arguments, Batch, map_tensors

from ..checkpoint._device_generator import module_of
from ..skip import Skippable
from ..skip._store import Key, routed
from ..values._leaves import as_nonleaf, clone_leaves, versions

SEED = 20_041_911


class Signal(NamedTuple):
    """What goes into a layer: its argument, and the skips that it pops."""

    value: Any
    skips: dict[Key, Tensor | None]

    def tensors(self) -> list[Tensor]:
        return list(Batch((self.value, *self.skips.values())))

    def replaced(self, tensors: Sequence[Tensor]) -> Signal:
        """The same with other tensors, in the order of :meth:`tensors`."""
        given = iter(tensors)
        value = map_tensors(lambda _: next(given), self.value)
        return Signal(value, {key: None if skip is None else next(given) for key, skip in self.skips.items()})


class Trial(NamedTuple):
    """What a run showed.

    Attributes:
        output: what it gave on: its return value, and the skips that it stashed; detached, but with requires_grad.
        gradients: of the tensors that went in; None where there is none.
        drew: whether it used a generator of PyTorch.
        drew_elsewhere: whether it used Python's or NumPy's.
        in_place: whether it changed what went in.
    """

    output: Signal
    gradients: list[Tensor | None]
    drew: bool
    drew_elsewhere: bool
    in_place: bool


def attempt(layer: nn.Module, signal: Signal, cotangents: Sequence[Tensor] | None = None) -> Trial:
    """Run ``layer`` from the same state of all generators as every other attempt; and backward, from ``cotangents``.

    Args:
        cotangents: gradients of what it gives on, in the order of its tensors.
    """
    leaves = clone_leaves(Batch((signal.value, *signal.skips.values())))
    entered = as_nonleaf(leaves)
    before = versions(entered)
    value, *skips = entered.value
    store = dict(zip(signal.skips, skips, strict=True))
    with seeded(layer) as generators, routed(store):
        output = layer(*value.args, **value.kwargs) if isinstance(value, Arguments) else layer(value)
        drew, drew_elsewhere = generators.drew(), generators.drew_elsewhere()
    given = Signal(output, {key: skip for key, skip in store.items() if key not in signal.skips})
    if cotangents is not None:
        _backward(given.tensors(), cotangents)
    return Trial(
        given.replaced([_detached(tensor) for tensor in given.tensors()]),
        [tensor.grad for tensor in leaves],
        drew,
        drew_elsewhere,
        versions(entered) != before,
    )


def _backward(outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
    pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if pairs:
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


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
