"""Test whether a model's loss follows the convention of ``num_items_in_batch``.

By this convention, the loss is a sum over labels, divided by the argument ``num_items_in_batch``. If that is omitted,
it is divided by the number of labels that are not -100. If each micro-batch receives the number of items of the full
mini-batch, the losses of micro-batches add up.

Nothing is inferred from the losses of a mini-batch. Instead, a copy of the model computes losses of made-up rows, for
which random numbers replace the outputs of its blocks. It does so for the full set of rows and for parts of it, with
and without the argument, and for many kinds of labels and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from microbatch import Arguments, flatten, unflatten

from .._current import doing
from ..engine._loss_value import own_loss
from ..module._signature import get_signature
from ._apart import apart, copy_to_cpu
from ._buffers import outside
from ._cache import without_cache
from ._called import answered
from ._count import COUNT
from ._elsewhere import Elsewhere, Unnumbered
from ._facts import Facts, Shape
from ._generators import generators_restored
from ._replay import Replay
from ._tree import map_tree

IGNORED = -100
ROWS = 3
ITEMS = 7.0
SHORT = 16
"""Longer sequences of labels are cut to this length if the model can compute a loss from the shorter ones."""


@dataclass(frozen=True)
class Convention:
    """The loss is a sum over labels, divided by ``num_items_in_batch``, or by the number of labels that are not -100.

    Attributes:
        skipped: the number of labels at the start of each row that do not count; 1 if a token predicts the next one.
    """

    skipped: int

    def count(self, labels: Tensor) -> Tensor:
        """Return the number of ``labels`` that count, without synchronizing with their device."""
        counted = labels if labels.dim() < 2 else labels[..., self.skipped :]
        return (counted != IGNORED).sum()


def may_follow(model: nn.Module, inputs: Arguments) -> bool:
    """Return whether ``model`` takes the number of items, and ``inputs`` have labels that may be counted."""
    labels, signature = inputs.kwargs.get("labels"), get_signature(model)
    if signature is None or not isinstance(labels, Tensor) or not labels.dim() or labels.is_floating_point():
        return False
    takes_any = any(each.kind == Parameter.VAR_KEYWORD for each in signature.parameters.values())
    return takes_any or COUNT in signature.parameters


def find_convention(
    model: nn.Module, blocks: Mapping[str, nn.Module], facts: Facts, inputs: Arguments, rows: int
) -> Convention | None:
    """Return the convention of a model in its current mode; None if it follows a different one, or cannot be tested.

    Args:
        facts: the facts from the forwards of the ``inputs``.
        inputs: the arguments for a micro-batch of ``rows`` rows.
    """
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), generators_restored():
            copied, copies = apart(model, blocks)
            made = _values(facts, inputs, rows)
            with _calls_caught(copied, copies, blocks):
                around, loss = outside(copied, copies.values()), _build_loss(copied, copies, facts)
                return next((_try_loss(values, loss, around) for values in made if loss(values) is not None), None)
    except Exception:  # the model cannot be copied, or its blocks return something else than rows of numbers
        return None


class Values(NamedTuple):
    """The values that a loss is computed from: arguments of the model, and outputs of blocks that it uses."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    used: dict[str, Tensor]

    def part(self, rows: Sequence[int]) -> Values:
        def take(tensor: Tensor) -> Tensor:
            if not tensor.dim() or tensor.shape[0] % ROWS:
                return tensor
            return tensor.reshape(ROWS, -1, *tensor.shape[1:])[list(rows)].flatten(0, 1)

        return Values(*map_tree((self.args, self.kwargs, self.used), take))

    def with_arguments(self, **changes: Any) -> Values:
        return self._replace(kwargs={**self.kwargs, **changes})

    def with_items(self, items: float) -> Values:
        return self.with_arguments(**{COUNT: torch.tensor(items)})

    def with_used(self, change: Callable[[Tensor], Tensor]) -> Values:
        return self._replace(used={name: change(tensor) for name, tensor in self.used.items()})


Loss = Callable[[Values], Tensor | None]
"""Returns the loss for some values; None if there is none."""


def _try_loss(values: Values, loss: Loss, around: Sequence[nn.Module]) -> Convention | None:
    """Return the convention of ``loss``, which modules ``around`` the blocks compute."""
    total = loss(values)
    if total is None or not total or not _are_same(total, loss(values)):
        return None  # some losses are random
    found = next((each for each in map(Convention, (1, 0)) if _holds(each, loss, values)), None)
    if found is None or not _is_of_labels(loss, values):
        return None
    others = [each for each in _others(values, around) if loss(each) is not None]
    return found if all(_holds(found, loss, each) for each in others) else None


def _holds(convention: Convention, loss: Loss, values: Values) -> bool:
    by_one, by_items = loss(values.with_items(1.0)), loss(values.with_items(ITEMS))
    parts = [loss(values.part(rows).with_items(1.0)) for rows in ([0], [1, 2])]
    plain, count = loss(values), float(convention.count(values.kwargs["labels"]))
    if by_one is None or by_items is None or plain is None or None in parts:
        return False
    alike = (by_items * ITEMS, plain * count, sum(each for each in parts if each is not None))
    return all(torch.allclose(by_one, torch.as_tensor(each), rtol=1e-5, atol=1e-7) for each in alike)


def _is_of_labels(loss: Loss, values: Values) -> bool:
    """Return whether the loss depends on nothing but the rows whose labels count.

    The balancing loss of a mixture of experts is a product of means. It may be so small that the losses of parts seem
    to add up.
    """
    labels = values.kwargs["labels"]
    nothing = loss(values.with_arguments(labels=torch.full_like(labels, IGNORED)).with_items(1.0))
    some = labels.clone()
    some[0] = IGNORED
    without = values.with_arguments(labels=some)
    return nothing is not None and not nothing and _are_same(loss(without), loss(without.with_used(_with_another_row)))


def _with_another_row(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return tensor
    found = tensor.clone()
    first = found[: len(found) // ROWS]
    first.mul_(-3).add_(first.flip(-1)).add_(1)
    return found


def _others(values: Values, around: Sequence[nn.Module]) -> Iterator[Values]:
    """Yield values with a special number in half of the first row of an argument, or with labels of any class."""
    leaves, tree = flatten((values.args, values.kwargs))
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.dim():
            for constant in sorted({0, 1, IGNORED, *_special(around)}):
                tensor = leaf.clone()
                tensor[_half_a_row(tensor)] = constant
                args, kwargs = unflatten([*leaves[:k], tensor, *leaves[k + 1 :]], tree)
                yield values._replace(args=args, kwargs=kwargs)
    labels, generator = values.kwargs["labels"], torch.Generator().manual_seed(0)
    for size in {tensor.shape[-1] for tensor in values.used.values()} | _sizes(around):
        number = max(1, size)
        first, any_order = torch.arange(labels.numel()), torch.randperm(number, generator=generator)
        for every in (first % number, any_order[first % number]):
            yield values.with_arguments(labels=every.reshape(labels.shape).to(labels))


def _half_a_row(tensor: Tensor) -> Any:
    return 0 if tensor.dim() == 1 else (0, ..., slice(tensor.shape[-1] // 2, None))


def _special(modules: Sequence[nn.Module]) -> set[int]:
    """Return the special tokens that configurations define, such as padding."""
    found = set[int]()
    for module in modules:
        config = vars(module).get("config")
        for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
            if type(value) is int and ("token" in name or name.endswith(("_id", "_index"))):
                found.add(value)
    return found


def _sizes(modules: Sequence[nn.Module]) -> set[int]:
    """Return the possible numbers of words or classes: the sizes of parameters."""
    return {size for module in modules for each in module.parameters(recurse=False) for size in each.shape}


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


# The values of made-up rows.


def _values(facts: Facts, inputs: Arguments, rows: int) -> Iterator[Values]:
    """Yield values for :data:`ROWS` rows: first with short rows, if these may be cut, then with rows of full length."""
    kwargs = {name: value for name, value in inputs.kwargs.items() if name != COUNT}
    labels = kwargs["labels"]
    length = labels.shape[-1] if labels.dim() > 1 else 0
    for short in (SHORT, length) if length > SHORT else (length,):
        generator = torch.Generator().manual_seed(0)
        made = _Made(rows, length, short, generator)
        args, named = map_tree((inputs.args, kwargs), made.argument)
        padded = named["labels"].clone()
        padded[_half_a_row(padded)] = IGNORED
        used = {f"{call} {leaf}": facts.answers[call].leaves[leaf] for call, leaf in sorted(facts.used)}
        yield Values(args, {**named, "labels": padded}, {name: made.output(shape) for name, shape in used.items()})


class _Made:
    """Creates tensors with :data:`ROWS` rows of length ``short`` from tensors with ``rows`` rows of ``length``."""

    def __init__(self, rows: int, length: int, short: int, generator: torch.Generator) -> None:
        self._rows, self._length, self._short, self._generator = rows, length, short, generator

    def _shorten(self, size: int) -> int:
        return self._short if self._length and size == self._length else size

    def argument(self, tensor: Tensor) -> Tensor:
        """Return rows similar to the rows of ``tensor``. If its first dimension is not divided into rows, keep that."""
        tensor = copy_to_cpu(tensor)
        for dim in range(1, tensor.dim()):
            if self._length and tensor.shape[dim] == self._length:
                tensor = tensor.narrow(dim, 0, self._short)
        if not tensor.dim() or not tensor.shape[0] or tensor.shape[0] % self._rows:
            return tensor
        each = tensor.reshape(self._rows, -1, *tensor.shape[1:])
        rows = [each[j % self._rows].roll(j, -1) if tensor.dim() > 1 else each[j % self._rows] for j in range(ROWS)]
        found = torch.stack(rows)
        if tensor.is_floating_point():
            noise = 0.1 * torch.randn(found.shape, generator=self._generator).to(found)
            found = (found + noise).clamp(tensor.min(), tensor.max())  # some are probabilities
        return found.flatten(0, 1)

    def output(self, shape: Shape) -> Tensor:
        """Return random numbers as an output of a block. They grow from row to row, so that the losses of rows differ.

        An output that does not consist of rows of numbers has no values, so a loss that depends on it cannot be tested.
        """
        size = shape.size
        if not shape.dtype.is_floating_point or not size or not size[0] or size[0] % self._rows:
            return torch.empty([*map(self._shorten, size)], dtype=shape.dtype, device="meta")
        first, *others = map(self._shorten, (size[0] // self._rows, *size[1:]))
        scale = torch.arange(1, ROWS * first + 1).reshape(-1, *[1] * len(others))
        return torch.randn((ROWS * first, *others), generator=self._generator) * scale


# The losses of a copy of the model.


@contextmanager
def _calls_caught(
    copied: nn.Module, copies: Mapping[str, nn.Module], blocks: Mapping[str, nn.Module]
) -> Iterator[None]:
    """Catch calls of the copied blocks, and of the originals, which uncopyable objects may refer to."""
    caught = {**copies, **{f"{name} itself": block for name, block in blocks.items()}}
    with ExitStack() as scope:
        scope.enter_context(answered(caught, dict.fromkeys(caught.values(), 0)))
        scope.enter_context(without_cache(copied))
        scope.enter_context(doing(rng=Unnumbered()))
        yield


def _build_loss(copied: nn.Module, copies: Mapping[str, nn.Module], facts: Facts) -> Loss:
    elsewhere = Elsewhere()

    def loss(values: Values) -> Tensor | None:
        try:
            rows = len(values.kwargs["labels"])
            trial = _Trial(
                copied, copies.values(), (), facts, [values.used], [[rows]], elsewhere, [torch.device("cpu")]
            )
            found: Tensor = own_loss(trial.output(Arguments(values.args, values.kwargs)))
        except Exception:  # a model may raise anything for labels that it does not know
            return None
        return found.double() if bool(found.isfinite()) else None

    return loss


class _Trial(Replay):
    """A replay without dropout."""

    def operate(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "dropout" in getattr(function, "__name__", "") and (args or "input" in kwargs):
            return args[0] if args else kwargs["input"]
        return super().operate(function, args, kwargs)
