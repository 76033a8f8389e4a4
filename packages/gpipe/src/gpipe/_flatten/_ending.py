"""The output of a model that computes its own loss, from what its modules returned for each micro-batch.

A loss may be a mean over a part of the mini-batch, such as all tokens without padding, and cannot be computed from the
losses of micro-batches. So a pipe concatenates what the modules next to the loss returned, and runs the model's own
``forward`` once more with these values in place of the modules. What it then computes is the loss.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import Arguments, map_tensors

from ..engine._settings import settings, with_settings
from ._inputs import Inputs
from ._script import Structure, restored, structure_of
from ._skeleton import Follower, is_placeholder, skeleton
from ._standins import Reel, Replaced, StandIn
from ._tree import flattened

Returned = dict[str, list[list[Tensor]]]
"""The tensors that modules returned, by name and call."""

LOSS_ONLY = frozenset({"num_items_in_batch"})
"""Arguments by which Hugging Face's ``Trainer`` tells models how to scale their loss."""

_SMALL = 2**20
"""The most elements of a parameter that goes to the loss with every row."""

_one_at_a_time = threading.RLock()


class Ending:
    """The end of a model's forward, without its modules. Copies of a layer share it.

    Args:
        model: a model that computes a loss.
        names: the names of the modules next to the loss.
        twins: its copies of modules are added here.

    Attributes:
        fields: the fields of the output that it can compute.
        state: the shapes of small parameters and buffers that the loss may read, by name.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], twins: list[Follower]) -> None:
        self._calls: dict[str, list[Structure]] = {name: [] for name in names}
        self._learns = False
        self._reel = _Playback()
        replaced = {
            model.get_submodule(name): _Replay(model.get_submodule(name), self._reel, name) for name in self._calls
        }
        twins += [Replaced(module, real) for real, module in replaced.items()]
        self._net = skeleton(model, replaced, lambda tensor: False, twins)
        own = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        self.state = {
            name: tensor.shape
            for name, tensor in self._net.named_buffers()
            if is_placeholder(tensor) and tensor.numel() <= _SMALL and name in own
        }
        self.fields = frozenset({"loss"})

    def __deepcopy__(self, memo: object) -> Ending:
        return self

    def on_cpu(self) -> Ending:
        """This ending, in which all tensors are on the CPU; ones in the place of those without data."""
        state = (*self._net.parameters(), *self._net.buffers())
        if all(tensor.device.type == "cpu" for tensor in state):
            return self
        found = copy.copy(self)
        found._net, found._reel = copy.deepcopy((self._net, self._reel))
        found._net._apply(lambda t: torch.ones_like(t, device="cpu") if t.is_meta else t.cpu())  # type: ignore[no-untyped-call]
        return found

    def wanted(self) -> AbstractContextManager[None]:
        """A context in which the last layer returns what this ending needs, in place of the model's output."""
        return with_settings(wanted=self)

    @property
    def is_wanted(self) -> bool:
        return settings().wanted is self

    @contextmanager
    def learning(self) -> Iterator[None]:
        """A context in which this ending learns what modules return.

        It is learned from the last layer, not from the model, in which ``output_hidden_states`` adds what blocks return
        to what the module around them does.
        """
        self._calls, self._learns = {name: [] for name in self._calls}, True
        try:
            yield
        finally:
            self._learns = False

    @contextmanager
    def recording(self, net: nn.Module) -> Iterator[Returned]:
        """A context that records in a dict what modules of ``net`` return.

        At its end the small parameters and buffers are added that the loss may read, such as a temperature, once for
        each row, as if a module had returned them.
        """
        found: Returned = {}
        with ExitStack() as scope:
            for name in self._calls:
                hook = partial(self._record, name, found.setdefault(name, []))
                scope.callback(net.get_submodule(name).register_forward_hook(hook).remove)
            yield found
        rows = next(tensor.shape[0] for calls in found.values() for call in calls for tensor in call)
        for name in self.state:
            module, _, own = name.rpartition(".")
            found[name] = [[getattr(net.get_submodule(module), own).expand(rows, *self.state[name]).clone()]]

    def _record(self, name: str, calls: list[list[Tensor]], module: object, args: object, value: Any) -> None:
        structure, number, known = _structure(value), len(calls), self._calls[name]
        if self._learns:
            known.append(structure)
        if number == len(known) or structure != known[number]:
            raise RuntimeError(
                f"{name!r} was called more often than with the sample, or returned another structure; flatten the "
                "model with a sample that it treats alike"
            )
        calls.append(_tensors(value))

    def __call__(self, inputs: Inputs, found: Returned, training: bool) -> Any:
        """What the model returns for ``inputs`` where its modules return what was ``found``, for all rows.

        The loss is on the device of the inputs, where trainers add losses up.

        Args:
            training: the mode of the model.
        """
        device = next(tensor.device for calls in found.values() for call in calls for tensor in call)
        args, kwargs = map_tensors(lambda tensor: tensor.to(device), tuple(inputs))
        values = {
            name: [restored(*each) for each in zip(self._calls[name], calls, strict=False)]
            for name, calls in found.items()
            if name in self._calls
        }
        as_tuple = kwargs.get("return_dict") is False
        if as_tuple:  # which does not tell the names of its fields
            kwargs = {**kwargs, "return_dict": True}
        state = {name: found[name][0][0][0] for name in self.state}
        with _one_at_a_time, self._reel.playing(values, device), self._with_state(state):
            output = self._net.train(training)(*args, **kwargs)
        fields = {name: value for name, value in output.items() if name in self.fields}
        if "loss" in fields:
            fields["loss"] = fields["loss"].to(inputs.tensors()[0].device)
        whole = type(output)(**fields)
        return whole.to_tuple() if as_tuple else whole

    @contextmanager
    def _with_state(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which the loss reads these values."""
        places = []
        for name, value in state.items():
            module, _, own = name.rpartition(".")
            buffers = self._net.get_submodule(module)._buffers
            places.append((buffers, own, value, buffers[own]))
        try:
            for buffers, own, value, _ in places:
                buffers[own] = value
            yield
        finally:
            for buffers, own, _, unknown in places:
                buffers[own] = unknown


class _Playback(Reel):
    """Where stand-ins find what modules returned."""

    _values: dict[str, Iterator[Any]]
    _device = torch.device("cpu")

    @contextmanager
    def playing(self, values: dict[str, list[Any]], device: torch.device) -> Iterator[None]:
        """A context in which modules return these values, one for each call."""
        self._values, self._device = {name: iter(calls) for name, calls in values.items()}, device
        try:
            yield
        finally:
            del self._values  # and with them the graph that they belong to

    @property
    def device(self) -> torch.device:
        return self._device

    def next(self, name: str) -> Any:
        return next(self._values[name])


class _Replay(StandIn):
    """Returns what a module returned."""

    reel: _Playback

    def __init__(self, real: nn.Module, reel: _Playback, name: str) -> None:
        super().__init__(real, reel)
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.reel.next(self._name)


def without_loss_only(inputs: Any) -> Any:
    """``inputs`` for the layers, without arguments that only the loss takes."""
    return split_loss_only(inputs)[1]


def split_loss_only(inputs: Any) -> tuple[dict[str, Any], Any]:
    """The arguments in ``inputs`` that only the loss takes, and ``inputs`` without them."""
    if isinstance(inputs, Arguments):
        found, kwargs = split_loss_only(inputs.kwargs)
        return found, Arguments(inputs.args, kwargs) if found else inputs
    if not isinstance(inputs, Mapping) or LOSS_ONLY.isdisjoint(inputs):
        return {}, inputs
    found = {name: value for name, value in inputs.items() if name in LOSS_ONLY}
    return found, {name: value for name, value in inputs.items() if name not in LOSS_ONLY}


def ending_of(model: nn.Module, inputs: Inputs, blocks: Collection[nn.Module], twins: list[Follower]) -> Ending | None:
    """How ``model`` computes its loss, seen in a run; None if it computes none, or does it among its ``blocks``."""
    returned: dict[nn.Module, list[Any]] = {}
    with ExitStack() as scope, torch.no_grad():
        for module in model.modules():
            scope.callback(module.register_forward_hook(partial(_note, returned)).remove)
        output = inputs.call(model)
    rows = next((tensor.shape[0] for tensor in inputs.tensors() if tensor.dim()), None)
    if not isinstance(output, dict) or not _is_loss(output.get("loss")) or rows is None:
        return None
    names = list(_around(model, returned, blocks, rows))
    return None if any(model.get_submodule(name) in blocks for name in names) else Ending(model, names, twins)


def _note(returned: dict[nn.Module, list[Any]], module: nn.Module, args: object, output: Any) -> None:
    returned.setdefault(module, []).append(output)


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.dim()


def _around(
    module: nn.Module, returned: Mapping[nn.Module, list[Any]], blocks: Collection[nn.Module], rows: int, path: str = ""
) -> Iterator[str]:
    """The largest modules that return values for rows alone, and those that are not called; the rest is the loss."""
    for name, child in module.named_children():
        called = returned.get(child, [])
        by_rows = called and all(_has_rows(value, rows) for value in called)
        if by_rows or child in blocks or not (called or any(True for _ in child.children())):
            yield path + name
        else:
            yield from _around(child, returned, blocks, rows, f"{path}{name}.")


def _has_rows(value: Any, rows: int) -> bool:
    return all(tensor.dim() and tensor.shape[0] == rows for tensor in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in flattened(value)[0] if isinstance(leaf, Tensor)]


def _structure(value: Any) -> Structure:
    return structure_of(*flattened(value), "the loss")
