"""Accept only sequential containers that do nothing but run their layers in order."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .._hooks import hook_kinds

# Attributes that a subclass may define, because they affect neither results nor state.
_HARMLESS = ("_get_name", "extra_repr", "dump_patches", "call_super_init")
_SPECIAL = ("__call__", "__iter__", "__len__", "__getattr__", "__getattribute__")


def expect_plain(module: nn.Sequential, known: tuple[type[nn.Module], ...] = ()) -> None:
    """Raise TypeError unless ``module`` only runs its layers in order. Methods of ``known`` classes are allowed.

    A pipe takes the layers out of their container, and would lose its methods, parameters, buffers and hooks.
    """
    problems = list(_problems(module, known))
    if problems:
        raise TypeError(
            "a pipe computes the layers of an nn.Sequential and nothing else, but this "
            f"{type(module).__name__} {'; it '.join(problems)}; "
            "move this to a layer or to a module around the pipe, or pass only the layers: "
            "nn.Sequential(OrderedDict(model.named_children()))"
        )


def is_plain(module: nn.Module, known: tuple[type[nn.Module], ...] = ()) -> bool:
    return not any(_problems(module, known))


def _problems(module: nn.Module, known: tuple[type[nn.Module], ...]) -> Iterator[str]:
    yield from _methods(module, known)
    yield from _belongings(module)


def _methods(module: nn.Module, known: tuple[type[nn.Module], ...]) -> Iterator[str]:
    for owner in type(module).__mro__:
        if owner in nn.Sequential.__mro__ or owner in known:
            continue
        names = [name for name in vars(owner) if hasattr(nn.Sequential, name) and not _harmless(name)]
        if names:
            yield f"overrides {_join_names(names)} in class {owner.__qualname__}"
    own = [name for name in vars(module) if callable(getattr(nn.Sequential, name, None))]
    if own:
        yield f"overrides {_join_names(own)} on the instance"


def _harmless(name: str) -> bool:
    if name.startswith("__") and name.endswith("__"):
        return name not in _SPECIAL
    return name in _HARMLESS


def _belongings(module: nn.Module) -> Iterator[str]:
    for what, names in (("parameters", module._parameters), ("buffers", module._buffers)):
        if names:
            yield f"owns {what} {_join_names(names)}"
    empty = [name for name, layer in module._modules.items() if layer is None]
    if empty:
        yield f"has no layer under {_join_names(empty)}, but None"
    hooks = hook_kinds(module)
    if hooks:
        yield f"has {', '.join(hooks)}, which can be registered on the pipe or on a layer instead"


def _join_names(names: object) -> str:
    return ", ".join(map(repr, names))  # type: ignore[call-overload]
