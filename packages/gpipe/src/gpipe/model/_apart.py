"""Copy a model without its blocks, so that trials leave the model unchanged."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ._blocks import Blocks
from ._generators import every_generator_restored


def apart(model: nn.Module, blocks: Mapping[str, nn.Module]) -> tuple[nn.Module, Blocks]:
    """Return a copy of ``model`` on the CPU, and its blocks.

    The blocks have no values. Their floating-point parameters and buffers are NaN, so any result computed from them
    is NaN as well. All other parameters are increased by one, because a parameter of 0 may hide that a loss depends on
    it.
    """
    own = {each: None for block in blocks.values() for each in block.modules()}
    memo: dict[int, Any] = {}
    for module in model.modules():
        if module not in own:
            memo.update({id(tensor): copy_to_cpu(tensor) for tensor in tensors_in(module)})
    for module in own:
        for tensor in tensors_in(module):
            memo.setdefault(id(tensor), _without_values(tensor))
    for module in own:
        _empty(module, memo)
    copied = copy.deepcopy(model, memo)
    return copied, {name: memo[id(block)] for name, block in blocks.items()}


def copy_to_cpu(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, in the default precision."""
    local = tensor.detach().to("cpu", copy=True)
    if local.is_floating_point():
        local = local.to(torch.get_default_dtype())
        return nn.Parameter(local + 1, requires_grad=False) if isinstance(tensor, nn.Parameter) else local
    return local


def _without_values(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    found = torch.full((), math.nan, dtype=torch.get_default_dtype()).expand(tensor.shape)
    return nn.Parameter(found, requires_grad=False) if isinstance(tensor, nn.Parameter) else found


def tensors_in(module: nn.Module) -> list[Tensor]:
    """Return the parameters, the buffers, and the tensors that are attributes of ``module`` itself."""
    held = (module._parameters, module._buffers, vars(module))
    return [each for values in held for each in values.values() if isinstance(each, Tensor)]


def _empty(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a module with the attributes of ``module``, but without its hooks, and with the tensors in ``memo``."""
    known = memo.get(id(module))
    if known is not None:
        return known  # type: ignore[no-any-return]
    empty: nn.Module = memo.setdefault(id(module), type(module).__new__(type(module)))
    vars(empty).update(vars(module))
    hooks = {name: type(value)() for name, value in vars(module).items() if name.endswith("_hooks")}
    vars(empty).update(hooks)
    for name in ("_parameters", "_buffers"):
        held = vars(module)[name]
        vars(empty)[name] = {key: each if each is None else memo[id(each)] for key, each in held.items()}
    children = module._modules.items()
    vars(empty)["_modules"] = {key: each if each is None else _empty(each, memo) for key, each in children}
    return empty


@contextmanager
def unchanged(model: nn.Module, devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the buffers of ``model`` and all random number generators afterwards."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with every_generator_restored(devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
