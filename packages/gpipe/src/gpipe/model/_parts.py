"""The part of a model that each stage holds, under the model's own names."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence

import torch
from torch import Tensor, nn

from .._gpipe import indent
from ..module._init._model import Own
from ._blocks import Blocks, Division, map_blocks_to_stages


class Part(nn.Module):
    """The modules, parameters and buffers of one stage. Their names contain the path in the model.

    This is a second view of the model. It is moved and searched, but never called or registered in the pipe.
    """

    def __repr__(self) -> str:
        shown = {name: each for name, each in self.named_children() if not isinstance(each, Own)}
        lines = [f"  ({name}): {indent(repr(each))}" for name, each in shown.items()]
        return "\n".join([f"{type(self).__name__}(", *lines, ")"])

    def forward(self) -> None:
        raise RuntimeError("a part of a model cannot be called; call the pipe")


def build_parts(model: nn.Module, division: Division) -> list[Part]:
    """Return the part of each stage.

    Everything outside the blocks belongs to the stage of the block that is used before it. If that is not known, it
    belongs to the stage of the block that the model registers before it, or to the first stage.
    """
    parts = [Part() for _ in division.balance]
    for path, module, stage in _entries(model, "", division, map_blocks_to_stages(division), 0, set()):
        parts[stage]._modules[path] = module
    for part in parts:
        part.training = model.training
    return parts


Entry = tuple[str, nn.Module, int]


def _entries(
    module: nn.Module, path: str, division: Division, stages: Mapping[nn.Module, int], at: int, seen: set[nn.Module]
) -> Generator[Entry, None, int]:
    """Yield the modules that stages hold, with names and stages. Return the stage of the last block, or ``at``."""
    if module in seen:
        return at
    seen.add(module)
    if path and (module in stages or not _contains(module, stages)):
        at = stages.get(module, at)
        if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
            yield path, module, at if module in stages else _stage_after([*module.modules()], division, stages, at)
        seen.update(module.modules())
        return at
    if not path or module._parameters or module._buffers:
        yield path, Own(module), _stage_after([module], division, stages, at)
    prefix = f"{path}." if path else ""
    for name, child in module._modules.items():
        if child is not None:
            at = yield from _entries(child, prefix + name, division, stages, at, seen)
    return at


def _stage_after(
    modules: Sequence[nn.Module], division: Division, stages: Mapping[nn.Module, int], default: int
) -> int:
    """Return the stage that uses one of ``modules`` first, if that is known."""
    found = [division.after[module] for module in modules if module in division.after]
    return min((0 if name is None else stages[division.blocks[name]] for name in found), default=default)


def _contains(module: nn.Module, stages: Mapping[nn.Module, int]) -> bool:
    return any(each in stages for each in module.modules())


def find_common(parts: Sequence[nn.Module], blocks: Blocks) -> dict[str, nn.Module]:
    """Return the modules that stages share: those with buffers only, and the buffers of modules around blocks."""
    inside = {*blocks.values()}
    found: dict[str, nn.Module] = {}
    for path, module in ((path, module) for part in parts for path, module in part.named_children()):
        if isinstance(module, Own) and module._buffers:
            found[path] = buffers = Own(module.of)
            vars(buffers)["_parameters"] = {}
        elif module not in inside and not any(True for _ in module.parameters()):
            found[path] = module
    return found


def find_others(parts: Sequence[nn.Module], blocks: Collection[nn.Module]) -> list[dict[str, nn.Module]]:
    """Return the modules in each part that have parameters and are not blocks."""
    return [
        {
            path: module
            for path, module in part.named_children()
            if module not in blocks and not isinstance(module, Own) and any(True for _ in module.parameters())
        }
        for part in parts
    ]


def build_tree(model: nn.Module, parts: Sequence[nn.Module]) -> nn.Module:
    """Return a module with the contents of some ``parts`` of ``model``, under its names and in its order."""
    found = [module for part in parts for module in part._modules.values()]
    owned = {module.of: module for module in found if isinstance(module, Own)}
    return _tree(model, {*found}, owned) or nn.Module()


def _tree(module: nn.Module, held: Collection[nn.Module | None], owned: Mapping[nn.Module, Own]) -> nn.Module | None:
    if module in held:
        return module
    tree = nn.Module()
    if module in owned:
        vars(tree).update({name: vars(owned[module])[name] for name in _TENSORS})
    for name, child in module._modules.items():
        below = None if child is None else _tree(child, held, owned)
        if below is not None:
            tree._modules[name] = below
    return tree if tree._modules or tree._parameters or tree._buffers else None


def empty_parts(parts: Sequence[nn.Module], kept: nn.Module) -> None:
    """Move ``parts`` of a model to ``meta``, except for tensors that ``kept`` shares with them."""
    found: dict[int, Tensor] = {id(tensor): tensor for tensor in (*kept.parameters(), *kept.buffers())}
    for module in (module for part in parts for module in part.modules()):
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    if id(tensor) not in found:
                        made = found[id(tensor)] = _without_data(tensor)
                        found[id(made)] = made
                    tensors[name] = found[id(tensor)]  # type: ignore[assignment]


def _without_data(tensor: Tensor) -> Tensor:
    bare = torch.empty_like(tensor, device="meta")
    return nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare


_TENSORS = ("_parameters", "_buffers", "_non_persistent_buffers_set")
