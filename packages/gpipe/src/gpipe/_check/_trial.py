"""Run one layer in isolation, recording its outputs, its RNG use and its gradients."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import Arguments

from .._current import doing
from ..checkpoint._device_generator import get_device_module
from ..skip.namespace import Key
from ..values._leaves import Activation, as_nonleaf, clone_leaves

SEED = 20_041_911


class Signal(NamedTuple):
    """The input or output of a layer: a value, and the skips that the layer pops or stashes."""

    value: Any
    skips: dict[Key, Tensor | None]

    def activation(self) -> Activation:
        return Activation((self.value, *self.skips.values()))

    def tensors(self) -> list[Tensor]:
        return list(self.activation().tensors)

    def replaced(self, tensors: Sequence[Tensor]) -> Signal:
        value, *skips = self.activation().with_tensors(tensors).value
        return Signal(value, dict(zip(self.skips, skips, strict=True)))


class LayerTrial(NamedTuple):
    """The results of a forward, and the tensors that its backward needs.

    Attributes:
        output: the output, detached but with the same ``requires_grad``.
        used: how the forward used the generators.
        roots: the tensors of ``output``, with their graph.
        leaves: the input tensors.
    """

    output: Signal
    used: Used
    roots: Sequence[Tensor]
    leaves: Sequence[Tensor]

    def tensors(self) -> list[Tensor]:
        return self.output.tensors()

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        pairs = [(y, g) for y, g in zip(self.roots, gradients, strict=True) if y.requires_grad and g is not None]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]


def attempt(layer: nn.Module, signal: Signal) -> LayerTrial:
    """Run the forward of ``layer``, from the same state of the generators each time."""
    leaves = clone_leaves(signal.activation())
    value, *skips = as_nonleaf(leaves).value
    store = dict(zip(signal.skips, skips, strict=True))
    with seeded(layer) as used, doing(skips=store):
        output = call(layer, value)
    returned = Signal(output, {key: skip for key, skip in store.items() if key not in signal.skips})
    roots = returned.tensors()
    detached = returned.replaced([tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in roots])
    return LayerTrial(detached, used, roots, leaves.tensors)


def call(layer: nn.Module, value: Any) -> Any:
    return layer(*value.args, **value.kwargs) if isinstance(value, Arguments) else layer(value)


def call_all(model: nn.Module, value: Any) -> Any:
    """Return the output of ``model``. The first layer of an ``nn.Sequential`` may take several arguments."""
    if not isinstance(model, nn.Sequential):
        return call(model, value)
    for layer in model.children():
        value = call(layer, value)
    return value


class Used:
    """The use of generators in a ``with`` block.

    Attributes:
        drew: whether the state of a PyTorch generator changed.
        impure: uses that a pipeline does not repeat, as text; may be empty.
        states: the states of PyTorch's generators after the block.
    """

    drew = False
    impure = ""
    states: Sequence[Tensor] = ()


@contextmanager
def seeded(layer: nn.Module) -> Iterator[Used]:
    """Seed PyTorch's generators for the block. Afterwards, restore them and Python's and NumPy's generators."""
    tensor = next(iter((*layer.parameters(), *layer.buffers())), torch.zeros(()))
    module, numpy, used = get_device_module(tensor.device), sys.modules.get("numpy"), Used()
    devices = [] if module is None else [tensor.device.index or 0]
    python, arrays = random.getstate(), numpy and numpy.random.get_state()

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([] if module is None else [module.get_rng_state(tensor.device)])]

    with torch.random.fork_rng(devices, device_type=tensor.device.type if devices else "cuda"):
        torch.manual_seed(SEED)
        before = states()
        try:
            yield used
        finally:
            used.states = states()
            used.drew = not same(before, used.states)
            others = random.getstate() != python or (numpy and _plain(numpy.random.get_state()) != _plain(arrays))
            reseeded = "seeds PyTorch's global generator" if torch.initial_seed() != SEED else ""
            used.impure = "uses Python's or NumPy's generator" if others else reseeded
            random.setstate(python)
            if numpy:
                numpy.random.set_state(arrays)


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _plain(state: Any) -> tuple[Any, ...]:
    return (state[1].tobytes(), *state[2:])
