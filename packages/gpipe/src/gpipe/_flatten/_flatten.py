""":func:`flatten`: a model as a sequence of layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.random import fork_rng

from microbatch import unwrap

from ..skip import Namespace
from ._cache import expect_followed, without_cache
from ._calls import Calls
from ._inputs import Inputs
from ._names import Flattened
from ._segment import ModelBlock, Pick, Segment
from ._shapes import has_data, shapes_only, with_values
from ._skeleton import Follower, named_units, skeleton, twin_of
from ._standins import BlockStandIn, ModuleStandIn, Observe, StandIn
from ._training import expect_alike_in_training, in_mode, watched
from ._trunk import Trunk, find_trunks
from ._verify import add_own_loss, expect_equal, loss_seen


def flatten(
    model: nn.Module,
    sample: Any,
    *,
    blocks: str | Sequence[str] | None = None,
    pick: str | Callable[[Any], Any] | None = None,
) -> nn.Sequential:
    """Make an ``nn.Sequential`` that computes what ``model`` computes: its begin, its blocks, and its end.

    The layers contain the modules of ``model``, and have its names in ``state_dict()``. The model remains usable, and
    is trained with the layers. These make no cache of keys and values, whatever its configuration says.

    Args:
        model: any module whose layers are in lists and are called once each, in order. Computations between two layers
            of a list must be done inside the layers.
        sample: an input of the model: a mapping for named arguments, a tuple for positional ones,
            :class:`microbatch.Arguments` for both, or one tensor. A few rows are enough. Later inputs of the pipe may
            have other numbers of rows and lengths. If the model has no data, because it was built on ``meta``, only
            shapes are computed and compared; the sample may be on ``meta`` too.
        blocks: the names of the lists of layers; found by default.
        pick: what the last layer returns of the model's output: the name of a field, or a function. By default the
            field ``loss`` if the sample lets the model compute it, else ``logits``, else ``last_hidden_state``,
            else the first field; a tensor or a tuple is returned as it is.

    Returns:
        The layers. The first one takes the arguments of the model.

    Raises:
        TypeError: ``pick`` is neither a name nor a function.
        ValueError: there are no such lists, or the layers would not compute what the model computes; the message says
            why.

    >>> import torch
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)
    ...         self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    ...     def forward(self, x):
    ...         x = self.first(x).relu()
    ...         for layer in self.layers:
    ...             x = layer(x)
    ...         return self.last(x.tanh())
    >>> list(dict(flatten(Model(), torch.ones(1, 2)).named_children()))
    ['start', 'layers_0', 'layers_1', 'end']
    """
    inputs, picked = Inputs.of(unwrap(sample)[0]), _picker(pick)
    if not has_data(model):
        inputs = with_values(inputs)
    expect_followed(model, inputs, model.modules())
    with _unchanged(model) as before, without_cache(model):
        layers = _flattened(model, inputs, blocks, picked, whole=pick is None)
        _expect_kept(model, layers, before)
    for twin in layers.twins:
        twin.follow()
    return layers


def _flattened(
    model: nn.Module, inputs: Inputs, blocks: str | Sequence[str] | None, pick: Pick, *, whole: bool
) -> Flattened:
    """The layers.

    Args:
        whole: whether the pipe may return the whole output.
    """
    with in_mode(False, model), shapes_only(model):
        trunks = find_trunks(model, inputs, blocks)
        calls = watched(model, inputs, trunks)
        if calls.between:
            raise ValueError(
                f"{calls.between[0]!r} is called between two blocks of one list, where only blocks can be; let a block "
                "call it, or name other lists: GPipe(model, sample=sample, blocks=...)"
            )
    twins: list[Follower] = []
    layers = _built(model, inputs, trunks, calls, pick, twins)  # its copies of modules have the modes of the model
    with in_mode(False, model, layers):
        with shapes_only(model) as shapes:
            expect_equal(model, layers, inputs, pick, shapes)
            seen = loss_seen(model, layers, inputs, pick, shapes)
        if seen is not None:
            add_own_loss(model, layers, inputs, pick, *seen, whole=whole)
    if has_data(model):
        expect_alike_in_training(type(model).__name__, layers, inputs)
    return layers.of(model, twins)


def _built(
    model: nn.Module, inputs: Inputs, trunks: Sequence[Trunk], calls: Calls, pick: Pick, twins: list[Follower]
) -> Flattened:
    flattened = Flattened(OrderedDict(_parts(model, inputs, trunks, calls, pick, twins)))
    for module in (flattened, *flattened.children()):
        module.training = model.training
    return flattened


def _parts(
    model: nn.Module, inputs: Inputs, trunks: Sequence[Trunk], calls: Calls, pick: Pick, twins: list[Follower]
) -> Iterator[tuple[str, nn.Module]]:
    """A segment before, between and after the trunks, and the blocks of the trunks, in order, with their names."""
    number, namespace = 0, Namespace()  # the number of the next block
    for s, trunk in enumerate([*trunks, []]):
        net, picked = _net(model, trunks, calls, s, twins), None if trunk else pick
        segment = Segment(net, calls, inputs, names=trunk, first=number, number=s, namespace=namespace, pick=picked)
        yield _title(s, len(trunks)), segment
        for place, name in enumerate(trunk):
            module, last = model.get_submodule(name), name == trunk[-1]
            block = ModelBlock(module, name, calls, place=place, number=number, last=last, namespace=namespace)
            yield name.replace(".", "_"), block
            number += 1


def _title(segment: int, trunks: int) -> str:
    if segment in (0, trunks):
        return "end" if segment else "start"
    return f"between_{segment}"


def _net(model: nn.Module, trunks: Sequence[Trunk], calls: Calls, segment: int, twins: list[Follower]) -> nn.Module:
    """The copy of the model for ``segment``; copies of modules are added to ``twins``."""
    names = [name for trunk in trunks for name in trunk]
    replaced: dict[nn.Module, nn.Module] = {
        model.get_submodule(name): BlockStandIn(model.get_submodule(name), name, j, calls.blocks[j])
        for j, name in enumerate(names)
    }
    last = len(trunks)
    for name, unit in named_units(model, frozenset(replaced), frozenset(calls.modules)):
        has_state = any(True for _ in unit.parameters()) or any(True for _ in unit.buffers())
        own = _segments(unit, calls) or ({last} if has_state else {segment})
        if segment not in own:
            replaced[unit] = ModuleStandIn(unit, name, calls.modules.get(unit, []))
        elif unit in calls.modules and max(own) < last:
            replaced[unit] = _observed(unit, name)
            twins.append(Follower(replaced[unit], unit, f"{name}."))
    return skeleton(model, replaced, lambda tensor: segment in calls.tensors.get(id(tensor), {last}), twins)


def _segments(unit: nn.Module, calls: Calls) -> set[int]:
    """The segments that need ``unit``."""
    state = (*unit.parameters(), *unit.buffers())
    called = {call.segment for call in calls.modules.get(unit, ())}
    return called.union(*(calls.tensors.get(id(tensor), set()) for tensor in state))


def _observed(unit: nn.Module, name: str) -> nn.Module:
    twin = twin_of(unit)
    twin.register_forward_hook(Observe(name))
    return twin


def _expect_kept(model: nn.Module, layers: Flattened, before: _Attributes) -> None:
    """Raise ValueError for attributes that a run has set, and that several layers have, or read of another one.

    They may be of any micro-batch, and have the graph of another stage.

    Args:
        before: the attributes of all modules before the runs on the sample.
    """
    asked = {each for module in layers.modules() if isinstance(module, StandIn) for each in module.real.asked}
    divided, now = {twin.source for twin in layers.twins}, _attributes(model)
    for path, module in model.named_modules():
        if module not in before:
            raise ValueError(
                f"{type(model).__name__} cannot be divided: its forward makes the module {path!r} anew; make it when "
                "the model is built"
            )
        for name, value in now[module].items():
            then = before[module].get(name, _NEW)
            is_number = isinstance(value, Number) and isinstance(then, Number)
            if value is then or (is_number and value == then):
                continue
            where = repr(f"{path}.{name}".lstrip("."))
            if (module, name) in asked:
                raise ValueError(
                    f"{type(model).__name__} cannot be divided: its forward reads {where}, which that module sets anew "
                    "in each run; let the module return it"
                )
            if module in divided and (is_number or (name in module._buffers and then is not _NEW)):
                raise ValueError(
                    f"{type(model).__name__} cannot be divided: its forward sets {where} anew, of which each part of "
                    "it would have one of its own; keep it in a buffer, and change that in place"
                )


_NEW = object()
_Attributes = dict[nn.Module, dict[str, Any]]


def _attributes(model: nn.Module) -> _Attributes:
    """The attributes and buffers of all modules."""
    return {module: {**vars(module), **module._buffers} for module in model.modules()}


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[_Attributes]:
    """A context in which runs of ``model`` leave no trace: buffers, attributes and random numbers stay as they are.

    Yields:
        The attributes of all modules.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_meta]
    own = [(entries, dict(entries)) for module in model.modules() for entries in (vars(module), module._buffers)]
    try:
        with fork_rng(devices=[]):
            yield _attributes(model)
    finally:
        for entries, then in own:
            entries.clear()
            entries.update(then)
        for buffer, before in buffers:
            if not torch.equal(buffer, before):  # batch norm changes its buffers without a count in _version
                buffer.data.copy_(before)


def _picker(pick: str | Pick | None) -> Pick:
    if callable(pick):
        return pick
    if pick is not None and not isinstance(pick, str):
        raise TypeError(f"pick must be the name of a field of what the model returns, or a function; got {pick!r}")
    return _main_field if pick is None else partial(_field, pick)


def _field(name: str, output: Any) -> Any:
    return output[name] if isinstance(output, dict) else getattr(output, name)


def _main_field(output: Any) -> Any:
    """The field that a pipe returns by default."""
    if not isinstance(output, dict):
        return output
    found = next((name for name in ("loss", "logits", "last_hidden_state") if output.get(name) is not None), None)
    return output[found] if found else next(value for value in output.values() if isinstance(value, Tensor))
