""":func:`flatten`: a model as a sequence of layers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from microbatch import map_tensors, unwrap

from ..engine._loss_value import has_own_loss
from ..skip import Namespace
from ._cache import expect_documents_apart, without_cache
from ._calls import Called, Calls, observe
from ._changes import State, unchanged
from ._collected import asked_of, expect_returned
from ._ending import Ending, ending_of
from ._inputs import Inputs
from ._names import Flattened
from ._segment import ModelBlock, Pick, Segment, picker
from ._shapes import has_data, shapes_only, with_values
from ._skeleton import followers, named_units, skeleton
from ._standins import StandIn, saw
from ._trunk import Trunk, cut_at, find_trunks
from ._verify import add_own_loss, expect_equal
from ._watch import watch


def flatten(
    model: nn.Module,
    sample: Any,
    *,
    blocks: str | Sequence[str] | None = None,
    pick: str | Callable[[Any], Any] | None = None,
) -> nn.Sequential:
    """Make an ``nn.Sequential`` that computes what ``model`` computes: its start, its blocks, and its end.

    The layers contain the modules of ``model``, and have its names in ``state_dict()``. The model remains usable, and
    is trained with the layers. These make no cache of keys and values, whatever its configuration says.

    Args:
        model: any module that calls modules: elements of lists, or others. What it computes between two of them is a
            layer of its own.
        sample: an input of the model: a mapping for named arguments, a tuple for positional ones,
            :class:`microbatch.Arguments` for both, or one tensor. A few rows are enough. Later inputs of the pipe may
            have other numbers of rows and lengths. For a model on ``meta`` only shapes are computed and compared; the
            sample may be on ``meta`` too.
        blocks: the names of the lists of layers, or of single layers. By default they are found.
        pick: what the last layer returns of the model's output: the name of a field, or a function. By default the
            field ``loss`` if the sample lets the model compute it, else ``logits``, else ``last_hidden_state``, else
            the first field; a tensor or a tuple is returned as it is.

    Returns:
        The layers. The first one takes the arguments of the model.

    Raises:
        TypeError: ``pick`` is neither a name nor a function.
        ValueError: no modules are called, or the layers would not compute what the model computes; the message says
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
    # A copy: a forward may change it in place, before it is refused.
    inputs = Inputs.of(map_tensors(Tensor.clone, unwrap(sample)[0]))
    picked = picker(pick)
    if not has_data(model):
        inputs = with_values(inputs)
    expect_documents_apart(model, inputs)
    with unchanged(model) as state, without_cache(model):
        layers = _flattened(model, inputs, blocks, picked, state)
    asked, ending = asked_of(model, inputs, model.modules()), layers[-1].ending
    if pick is None:
        expect_returned(asked, None if ending is None else ending.missing)
    for layer in layers:
        vars(layer)["asked"] = asked
    for twin in followers(layers):
        twin.follow()
    return layers


def _flattened(
    model: nn.Module, inputs: Inputs, blocks: str | Sequence[str] | None, pick: Pick, state: State
) -> Flattened:
    """The layers, where ``state`` is that of the model before the runs on the sample."""
    with _in_mode(False, model), shapes_only(model):
        called, output = observe(model, inputs)
    refusals = []
    for trunks in find_trunks(model, [module for module, _ in called], blocks):
        try:
            return _divided(model, inputs, called, output, pick, state, trunks)
        except ValueError as refusal:
            refusals.append(refusal)
            state.restore()
    raise refusals[0]


def _divided(
    model: nn.Module, inputs: Inputs, called: Called, output: Any, pick: Pick, state: State, trunks: Sequence[Trunk]
) -> Flattened:
    """The layers where these are the ``trunks``, from the modules that were called, and the output, for the sample."""
    name = type(model).__name__
    calls = _watched(model, inputs, trunks)
    if calls.cuts:
        trunks = list(cut_at(trunks, calls.cuts))
        calls = _watched(model, inputs, trunks)
    calls.expect_drawn_once(name)
    changed = state.changed()
    state.restore()
    expected, ending = pick(output), None
    if has_own_loss(expected):
        ending = ending_of(model, inputs, called, [model.get_submodule(each) for trunk in trunks for each in trunk])
    layers = Flattened(OrderedDict(_parts(model, inputs, trunks, calls, pick, ending)))
    for module in (layers, *layers.children()):  # its copies of modules have the modes of the model
        module.training = model.training
    with _in_mode(False, model, layers), shapes_only(model) as shapes:
        expect_equal(name, expected, layers, inputs, shapes)
        if ending is not None:
            add_own_loss(name, output, layers, inputs, shapes)
    changed.expect_of_one(name, layers)
    if ending is not None:
        changed.expect_none_of_loss(name, layers[-1], ending.calls)
    return layers.of(model)


def _watched(model: nn.Module, inputs: Inputs, trunks: Sequence[Trunk]) -> Calls:
    """What happens in both modes."""
    with _in_mode(False, model), shapes_only(model):
        calls = watch(model, inputs, trunks)
    with _in_mode(True, model), shapes_only(model), suppress(Exception):
        # If it fails, as a batch norm of one row, what it needs in training is seen when it trains.
        calls.add(watch(model, inputs, trunks))
    return calls


def _parts(
    model: nn.Module, inputs: Inputs, trunks: Sequence[Trunk], calls: Calls, pick: Pick, ending: Ending | None
) -> Iterator[tuple[str, nn.Module]]:
    """A segment before, between and after the trunks, and the blocks of the trunks, in order, with their names."""
    counts, namespace = Counter[str](), Namespace()  # of the calls of each block before
    for s, trunk in enumerate([*trunks, []]):
        own, first = None if trunk else ending, counts.total()
        net = _net(model, trunks, calls, s, own)
        segment = Segment(net, calls, inputs, names=trunk, first=first, number=s, namespace=namespace, pick=pick)
        segment.ending = own
        yield ("end" if not trunk else f"between_{s}" if s else "start"), segment
        for place, name in enumerate(trunk):
            module, number, last = model.get_submodule(name), first + place, place == len(trunk) - 1
            block = ModelBlock(module, name, calls, place=place, number=number, last=last, namespace=namespace)
            counts[name] += 1
            again = f"_call_{counts[name]}" if counts[name] > 1 else ""
            yield name.replace(".", "_") + again, block


def _net(model: nn.Module, trunks: Sequence[Trunk], calls: Calls, segment: int, ending: Ending | None) -> nn.Module:
    """The copy of the model for ``segment``, with the ``ending`` of the last one."""
    names, last = list(chain.from_iterable(trunks)), len(trunks)
    blocks: dict[nn.Module, list[int]] = {}  # the numbers of the calls of each
    for j, name in enumerate(names):
        blocks.setdefault(model.get_submodule(name), []).append(j)
    replaced = {block: StandIn(block, names[own[0]], calls.blocks, own) for block, own in blocks.items()}
    observed = {model.get_submodule(name): partial(saw, name) for name in (ending.calls if ending else ())}
    for name, unit in named_units(model, frozenset(blocks), frozenset(calls.modules)):
        has_state = any(True for _ in unit.parameters()) or any(True for _ in unit.buffers())
        own = calls.segments_of(unit) or ({last} if has_state else {segment})
        if segment not in own:
            replaced[unit] = StandIn(unit, name, calls.modules.get(unit, []))
            if unit in observed:  # a loss of two parts of a model is computed from what the first one returned
                replaced[unit].register_forward_hook(observed[unit])
        elif unit in calls.modules and segment < last:
            observed[unit] = partial(saw, name)
    return skeleton(model, replaced, lambda tensor: segment in calls.segments.get(id(tensor), {last}), observed)


@contextmanager
def _in_mode(training: bool, *models: nn.Module) -> Iterator[None]:
    before = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.train(training)
        yield
    finally:
        for module, mode in before.items():
            module.training = mode
