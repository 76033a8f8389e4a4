"""The model as one segment has it: what belongs there is the model's own, everything else a stand-in."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn


def skeleton(
    module: nn.Module,
    replaced: Mapping[nn.Module, nn.Module],
    keeps: Callable[[Tensor], bool],
    path: str = "",
) -> nn.Module:
    """``module`` with other modules in the place of some; everything else is shared with it.

    Modules around those that are replaced are shallow copies. Of their own parameters and buffers, those that
    ``keeps`` refuses become tensors that nobody should use.
    """
    if module in replaced:
        return replaced[module]
    if replaced.keys().isdisjoint(module.modules()):
        return module
    twin = twin_of(module)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else skeleton(child, replaced, keeps, f"{path}{name}.")
    for name, parameter in module._parameters.items():
        if parameter is not None and not keeps(parameter):
            del twin._parameters[name]
            twin.register_buffer(name, _unknown(parameter), persistent=False)
    for name, buffer in module._buffers.items():
        if buffer is not None and not keeps(buffer):
            del twin._buffers[name]
            twin.register_buffer(name, _unknown(buffer), persistent=False)
    first = next(module.parameters(), None)
    if first is not None and next(twin.parameters(), None) is None:
        _answer_for_parameters(twin, first)
    return twin


def _answer_for_parameters(twin: nn.Module, like: Tensor) -> None:
    """Let ``next(twin.parameters())`` tell dtype and device, which models ask for, where all belong elsewhere."""
    number = torch.full((), math.nan, dtype=like.dtype, device=like.device)
    # Not by register_buffer, which refuses it to a module that hands out attributes of one inside, as those of peft do.
    twin._buffers["stands_for_parameters"] = placeholder(number)
    twin._non_persistent_buffers_set.add("stands_for_parameters")
    twin.__dict__["parameters"] = partial(_stand_in_of, twin)


def _stand_in_of(twin: nn.Module, recurse: bool = True) -> Iterator[Tensor]:
    number = twin._buffers["stands_for_parameters"]
    assert number is not None
    yield number


def twin_of(module: nn.Module) -> nn.Module:
    """A shallow copy with the same parameters, buffers, children and hooks, in dicts of its own."""
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict) and name.startswith("_"):
            twin.__dict__[name] = copy.copy(value)
    twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return twin


def _unknown(tensor: Tensor) -> Tensor:
    value = math.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    return placeholder(torch.full_like(tensor, value, requires_grad=False))


def placeholder(tensor: Tensor) -> Tensor:
    """``tensor``, which stands in a segment for one that belongs elsewhere, and has no values that count."""
    tensor.stands_in = True  # type: ignore[attr-defined]  # copies of it have this too
    return tensor


def is_placeholder(tensor: Tensor) -> bool:
    """Whether it is what :func:`placeholder` returned."""
    return hasattr(tensor, "stands_in")


def named_units(
    model: nn.Module, blocks: frozenset[nn.Module], called: frozenset[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules outside of blocks that are called as a whole, or not at all, with their names."""
    for name, child in model.named_children():
        if child in blocks:
            continue
        if child in called or (blocks | called).isdisjoint(child.modules()):
            yield name, child
        else:
            for inner, unit in named_units(child, blocks, called):
                yield f"{name}.{inner}", unit
