"""Answer calls of blocks of other processes with tensors that have the right shapes, but are on ``meta``.

The block's own code computes the shapes. It runs once per kind of arguments: on ``meta``, or on zeros if it needs
values, as a mixture of experts does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import flatten, unflatten

from .._current import doing
from ..values._constants import is_constant
from ..values._leaves import AsNonleaf, version
from ._between import Applied
from ._collected import collector
from ._generators import generators_restored
from ._tree import map_tree
from ._written import Written


class Argument(NamedTuple):
    """Stands for a tensor among the arguments of a block, which the block returns."""

    number: int


class Like(NamedTuple):
    """Stands for a new tensor in the output of a block."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def bare(self) -> Tensor:
        """Return such a tensor on ``meta``."""
        return bare(torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta"), self.requires_grad)


class Output(NamedTuple):
    """The output of a block for arguments of a kind, without its tensors.

    Attributes:
        leaves: constants, and an :class:`Argument`, a :class:`Like` or a :class:`Same` for each tensor.
        tree: the structure of the output and of the values that hooks inside the block have collected.
        altered: the arguments that the block modifies in place.
    """

    leaves: Sequence[Any]
    tree: Any
    altered: Sequence[int]


class Same(NamedTuple):
    """Stands for a tensor that has occurred as an earlier leaf."""

    leaf: int


_KNOWN = Tensor, Argument, Like, Same
"""Leaves that can be described, beside constants."""

Make = Callable[[Tensor], Tensor]

_CPU = torch.device("cpu")

_MOST = 1 << 12
"""The number of calls whose outputs are remembered."""


class Elsewhere:
    """The blocks and functions of other processes, and their outputs for arguments of each kind.

    Args:
        device: a device of this process, where zeros are tried first.
    """

    def __init__(self, device: torch.device = _CPU) -> None:
        self._known: dict[Any, Output] = {}
        # Blocks that need values take longer, so their outputs are kept for as long as their state is the same.
        self._of_values: dict[Any, tuple[Any, Output]] = {}
        self._devices = [*dict.fromkeys((device, _CPU))]

    def forget(self) -> None:
        """Begin a run: blocks may have changed since the last one, with attributes, hooks or parameters."""
        self._known.clear()

    def call(self, name: str, module: nn.Module, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the output of the block ``name`` of another process. Its new tensors are on ``meta``.

        Raises:
            RuntimeError: its code fails both on ``meta`` and on zeros.
        """
        leaves, tree = flatten((args, kwargs))
        try:
            output = self._describe(name, module, function, leaves, tree, hooks=True)
        except Exception as error:
            raise RuntimeError(
                f"block {name!r} is on another rank, so that this one calls it on tensors without data to learn "
                f"the shapes of its outputs; that fails: {first_line(error)}; use a GPipe, or give the "
                "block, by blocks=, to a stage of the same rank as what uses its outputs"
            ) from error
        for k in output.altered:
            if not leaves[k].is_meta:
                raise RuntimeError(
                    "a block on another rank changes one of the inputs of the model in place, or a tensor made of them "
                    "alone, of which each rank has its own; let it change a clone"
                )
        return _fill(output, leaves)

    def operation(self, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        """Return the output of an operation between blocks, and the tensors with values that it would modify in place.

        Raises:
            RuntimeError, NotImplementedError: it fails on ``meta``; a ``torch.autograd.Function`` on zeros, too.
        """
        if not isinstance(function, Applied):
            return compute_on_meta(function, args, kwargs)
        leaves, tree = flatten((args, kwargs))
        try:
            output = self._describe(function.kind, None, function, leaves, tree, hooks=True)
        except Exception as error:
            raise RuntimeError(first_line(error)) from error
        return _fill(output, leaves), [leaves[k] for k in output.altered if not leaves[k].is_meta]

    def sizes(self, name: str, module: nn.Module, function: Any, args: Any, kwargs: Any) -> Mapping[int, torch.Size]:
        """Return the sizes of the tensors in the output of a block, by their number; none if its code fails.

        Hooks are not called, because they have seen this call for each micro-batch.
        """
        leaves, tree = flatten((args, kwargs))
        try:
            output = self._describe(name, module, function, leaves, tree, hooks=False)
        except Exception:
            return {}
        return {k: leaf.size for k, leaf in enumerate(output.leaves) if isinstance(leaf, Like)}

    def _describe(
        self, name: Any, module: nn.Module | None, function: Any, leaves: Sequence[Any], tree: Any, *, hooks: bool
    ) -> Output:
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *_modes(module), *collector()
        casts = torch.is_autocast_enabled(), torch.is_autocast_enabled("cpu")  # the first one is CUDA's
        key = (name, hooks, mode, casts, repr(tree), *map(_kind, leaves))
        output = self._known.get(key)
        if output is None:
            with nullcontext() if hooks or module is None else _without_hooks(module):
                output = self._recall(key, module) or self._learn(key, module, function, leaves, tree)
            if all(isinstance(leaf, _KNOWN) or is_constant(leaf) for leaf in (*leaves, *output.leaves)):
                if len(self._known) >= _MOST:  # the sizes of inputs keep changing
                    self._known.clear()
                self._known[key] = output
        return output

    def _recall(self, key: Any, module: nn.Module | None) -> Output | None:
        """Return the output of a block that needs values, from an earlier run; None if it has changed since."""
        known = self._of_values.get(key)
        return known[1] if known is not None and known[0] == _state(module) else None

    def _learn(self, key: Any, module: nn.Module | None, function: Any, leaves: Sequence[Any], tree: Any) -> Output:
        with suppress(Exception):  # its code needs values, or has kernels for some devices only
            return _output(module, function, leaves, tree, bare)
        found = self._learn_from_values(module, function, leaves, tree)
        if len(self._of_values) >= _MOST:
            self._of_values.clear()
        self._of_values[key] = _state(module), found
        return found

    def _learn_from_values(self, *call: Any) -> Output:
        *others, last = self._devices
        for device in others:
            with suppress(Exception):
                return _output_of_values(device, *call)
        return _output_of_values(last, *call)


def first_line(error: Exception) -> str:
    """Return the beginning of a message. Errors of operations that do not run on ``meta`` have many lines."""
    return str(error).strip().split("\n")[0][:200]


def bare(tensor: Tensor, requires_grad: bool | None = None) -> Tensor:
    """Return a tensor like ``tensor`` on ``meta``. If it requires grad, it is not a leaf."""
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return _as_given(found, tensor.requires_grad if requires_grad is None else requires_grad)


def compute_on_meta(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """Return the output of ``function`` on ``meta``, and the tensors with values that it would modify in place."""
    if function in _WITHOUT_KERNELS:
        args, kwargs = (map_tree(part, lambda each: _filled(each) if each.is_meta else each) for part in (args, kwargs))
        return map_tree(function(*args, **kwargs), bare), []
    made: dict[int, tuple[Tensor, Tensor, int]] = {}

    def on_meta(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        found = bare(tensor)
        made[id(found)] = found, tensor, version(found)
        return found

    if function in (Tensor.cpu, Tensor.cuda):
        function, args, kwargs = Tensor.to, (args[0], "meta"), {}
    args = [_on_meta(value) if function is Tensor.to else value for value in map_tree(args, on_meta)]
    kwargs = {key: _on_meta(value) if key == "device" else value for key, value in map_tree(kwargs, on_meta).items()}
    output = map_tree(function(*args, **kwargs), lambda each: made[id(each)][1] if id(each) in made else each)
    return output, [tensor for found, tensor, before in made.values() if version(found) != before]


_WITHOUT_KERNELS = {torch.ctc_loss, nn.functional.ctc_loss}
"""Functions that do not run on ``meta``, although the sizes of their outputs do not depend on values."""


def _on_meta(value: Any) -> Any:
    """Replace a device by ``meta``."""
    return (
        torch.device("meta") if isinstance(value, torch.device | str | int) and not isinstance(value, bool) else value
    )


def _filled(tensor: Tensor, value: int = 0, device: torch.device = _CPU) -> Tensor:
    if tensor.layout is torch.strided:
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).fill_(value)
    else:
        found = torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)
    return _as_given(found, tensor.requires_grad)


def _as_given(tensor: Tensor, requires_grad: bool) -> Tensor:
    if not requires_grad:
        return tensor
    with torch.enable_grad():
        found: Tensor = AsNonleaf.apply(tensor.requires_grad_())  # type: ignore[no-untyped-call]
    return found


def _modes(module: nn.Module | None) -> tuple[Any, ...]:
    """Return the modes of a block's modules, and whether its parameters require grad."""
    if module is None:
        return ()
    return *(each.training for each in module.modules()), *(each.requires_grad for each in module.parameters())


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)


def _output(module: nn.Module | None, function: Any, leaves: Sequence[Any], tree: Any, make: Make) -> Output:
    """Call a block or function with its tensor arguments replaced by ``make``, and describe its output."""
    given = [make(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    before = [version(each) if isinstance(each, Tensor) else 0 for each in given]
    sizes = {kind: len(values) for kind, values in collector().items() if isinstance(values, list)}
    try:
        with nullcontext() if module is None else _with_state(module, make), undrawn():
            args, kwargs = unflatten(given, tree)
            written = Written((args, kwargs), (args, kwargs))
            output = function(*args, **kwargs)
            if written.is_any:
                raise RuntimeError("it changes a list or dict that the model passes to it")
        collected = {kind: collector()[kind][size:] for kind, size in sizes.items()}
    finally:
        for kind, size in sizes.items():
            del collector()[kind][size:]
    found, structure = flatten((output, collected))
    known = {id(each): Argument(k) for k, each in enumerate(given) if isinstance(each, Tensor)}
    seen: dict[int, Same] = {}
    described = [_describe(leaf, known, seen, k) if isinstance(leaf, Tensor) else leaf for k, leaf in enumerate(found)]
    altered = [k for k, each in enumerate(given) if isinstance(each, Tensor) and version(each) != before[k]]
    return Output(described, structure, altered)


def _output_of_values(
    device: torch.device, module: nn.Module | None, function: Any, leaves: Sequence[Any], tree: Any
) -> Output:
    """Describe the output of a block or function whose code needs values, called with zeros and with ones."""
    found = _output(module, function, leaves, tree, partial(_filled, value=0, device=device))
    other = found
    with suppress(Exception):  # ones may be invalid, for example as indices
        other = _output(module, function, leaves, tree, partial(_filled, value=1, device=device))
    if any(_differ(a, b) for a, b in zip(found.leaves, other.leaves, strict=False)):
        raise RuntimeError("the numbers that it returns, or the sizes of its tensors, depend on values")
    return found


def _differ(a: Any, b: Any) -> bool:
    """Return whether two leaves are different numbers, or tensors of different sizes."""
    if isinstance(a, Like) and isinstance(b, Like):
        return a.size != b.size
    return isinstance(a, _NUMBERS) and isinstance(b, _NUMBERS) and repr(a) != repr(b)  # NaN is equal to NaN


_NUMBERS = bool, int, float, complex


def _state(module: nn.Module | None) -> Any:
    """Return what determines the output of a block besides its arguments, as far as it is in its modules."""
    return None if module is None else tuple([_state_of_one(each) for each in module.modules()])


def _state_of_one(module: nn.Module) -> Any:
    own = vars(module)
    tensors = {**module._parameters, **module._buffers}
    sizes = [(name, each.shape, each.dtype) for name, each in tensors.items() if each is not None]
    hooks = [id(hook) for kind in own if kind.endswith("_hooks") for hook in own[kind].values()]
    others = [(name, repr(value)) for name, value in own.items() if is_constant(value)]
    return type(module), own.get("forward"), tuple(sizes), tuple(hooks), tuple(others)


def _describe(leaf: Tensor, known: dict[int, Argument], seen: dict[int, Same], number: int) -> Any:
    if id(leaf) in known:
        return known[id(leaf)]
    if id(leaf) in seen:
        return seen[id(leaf)]
    seen[id(leaf)] = Same(number)
    return Like(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad)


def _fill(output: Output, leaves: Sequence[Any]) -> Any:
    """Return the output for the arguments ``leaves``, and add to the values that hooks collect."""
    for k in output.altered:
        if leaves[k].is_meta:
            with torch.no_grad():
                leaves[k].zero_()  # increments the version, as the block does
    found: list[Any] = []
    for leaf in output.leaves:
        if isinstance(leaf, Argument):
            found.append(leaves[leaf.number])
        elif isinstance(leaf, Same):
            found.append(found[leaf.leaf])
        else:
            found.append(leaf.bare() if isinstance(leaf, Like) else leaf)
    value, collected = unflatten(found, output.tree)
    for kind, values in collected.items():
        collector()[kind].extend(values)
    return value


@contextmanager
def _with_state(module: nn.Module, make: Make) -> Iterator[None]:
    """Replace the parameters and buffers of ``module`` by the results of ``make`` in this context."""
    entries = [own for each in module.modules() for own in (each._parameters, each._buffers)]
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [(own, dict(own)) for own in entries]
    made: dict[int, Any] = {}
    try:
        for own, tensors in before:
            for name, tensor in tensors.items():
                if tensor is not None and (make is not bare or not tensor.is_meta):
                    if id(tensor) not in made:
                        made[id(tensor)] = make(tensor)
                    own[name] = made[id(tensor)]
        yield
    finally:
        for own, tensors in before:
            own.update(tensors)


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Remove the hooks of ``module``, and of the modules inside it, in this context."""
    before = [(vars(each), {kind: vars(each)[kind] for kind in _HOOKS}) for each in module.modules()]
    try:
        for own, hooks in before:
            own.update({kind: OrderedDict[int, Any]() for kind in hooks})
        yield
    finally:
        for own, hooks in before:
            own.update(hooks)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Unnumbered:
    """Random numbers from a private generator, with the interface of ``CellRNG``."""

    at = draws = 0
    module = None

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def draw(self) -> torch.Generator:
        return self._generator

    def draw_on(self, device: torch.device) -> None: ...

    def saw(self, generator: torch.Generator) -> None: ...


@contextmanager
def undrawn() -> Iterator[None]:
    """Leave all generators, and the statistics of batch norms, unchanged."""
    with generators_restored(), doing(rng=Unnumbered(), statistics=None):
        yield
