"""Spec rules: how a leaf is split and how its pieces are combined."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


class NoValue:
    """The value of a rule that wraps no value. None would not do, because a rule may wrap it."""


Counts = Tensor | Sequence[int]


def _check_counts(counts: Counts) -> tuple[int, ...]:
    try:
        numbers = tuple(map(operator.index, counts.tolist() if isinstance(counts, Tensor) else counts))
    except TypeError:
        raise TypeError(
            f"counts of Split is {counts!r}; expected the number of rows of each sample, as in Split(counts=[2, 0, 1]),"
            " or a function of the mini-batch that returns them"
        ) from None
    if min(numbers, default=0) < 0:
        raise ValueError(f"counts of Split is {numbers}; expected numbers of at least 0")
    return numbers


def _is_constant(value: Any) -> bool:
    return value is NoValue or isinstance(value, bool | int | float | complex | str | bytes | None)


@dataclass(frozen=True, init=False, repr=False)
class Split:
    """A rule that splits and concatenates a tensor along `dim`, 0 by default; or a value with this rule.

    In a spec, `Split(1)` is the rule of the corresponding leaf or branch. As an argument, `Split(x, dim=1)` is `x` with
    this rule; the micro-batches contain parts of `x` without the rule.

    `counts` is the number of rows of each sample, as in `Split(counts=[2, 0, 1])` for the images of three texts. It is
    a list, an integer tensor, or a function of the mini-batch that returns one. If the mini-batch is `Arguments` with
    only keywords, the function gets them as a dict.

    Raises:
        TypeError: `dim` is not an integer, or `counts` are not integers.
        ValueError: one of the `counts` is negative.

    >>> import torch
    >>> from microbatch import scatter
    >>> [batch.value.shape for batch in scatter(Split(torch.ones(2, 3), dim=1), 3)]
    [torch.Size([2, 1]), torch.Size([2, 1]), torch.Size([2, 1])]
    >>> pictures = Split(torch.tensor([10, 11, 20]), counts=[2, 0, 1])
    >>> [batch.value[1].tolist() for batch in scatter((torch.ones(3), pictures), 3)]
    [[10, 11], [], [20]]
    """

    dim: int
    value: Any = field(compare=False)
    counts: tuple[int, ...] | Callable[[Any], Counts] | None

    def __init__(
        self, value: Any = NoValue, dim: int | None = None, *, counts: Counts | Callable[[Any], Counts] | None = None
    ) -> None:
        if dim is None:
            value, dim = (NoValue, value) if _is_constant(value) else (value, 0)
            dim = 0 if dim is NoValue else dim
        if type(dim) is not int:
            raise TypeError(f"dim of Split is {dim!r}; expected an integer, as in Split(1) or Split(x, dim=1)")
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "counts", counts if counts is None or callable(counts) else _check_counts(counts))

    def __repr__(self) -> str:
        counts = "" if self.counts is None else f", counts={self.counts!r}"
        cut = f"{self.dim}" if self.value is NoValue else f"{self.value!r}, dim={self.dim}"
        return f"Split({cut}{counts})"


@dataclass(frozen=True, repr=False)
class Replicate:
    """A rule that passes the whole leaf to every micro-batch; or a value with this rule, as in `Replicate(mask)`.

    All micro-batches share the leaf, so it must not be modified in place. Its gradients are summed. In `gather` it must
    be equal in all micro-batches, and the first is returned.

    >>> import torch
    >>> from microbatch import scatter
    >>> [batch.value for batch in scatter((torch.arange(4), Replicate('causal')), 2)]
    [(tensor([0, 1]), 'causal'), (tensor([2, 3]), 'causal')]
    """

    value: Any = field(default=NoValue, compare=False)

    def __repr__(self) -> str:
        return "Replicate()" if self.value is NoValue else f"Replicate({self.value!r})"


@dataclass(frozen=True, repr=False)
class Entries:
    """A rule for `scatter`: the list has one entry per row, of any type and size; or a list with this rule.

    Each micro-batch gets the entries of its rows, which are not split. It shares their tensors, so they must not be
    modified in place.

    >>> import torch
    >>> from microbatch import scatter
    >>> boxes = [{'boxes': torch.ones(count, 4)} for count in (3, 0, 1)]
    >>> batches = scatter({'pictures': torch.ones(3, 8), 'labels': Entries(boxes)}, 3)
    >>> [[len(each['boxes']) for each in batch.value['labels']] for batch in batches]
    [[3], [0], [1]]
    """

    value: Any = field(default=NoValue, compare=False)

    def __repr__(self) -> str:
        return "Entries()" if self.value is NoValue else f"Entries({self.value!r})"


@dataclass(frozen=True)
class Mean:
    """A rule for `gather`: average a leaf over all micro-batches, weighted by their rows.

    The leaf of a micro-batch is a mean over its rows: a number, or a tensor with the same shape in every micro-batch.

    >>> from microbatch import Batch, gather
    >>> gather([Batch(1.0, rows=(3,)), Batch(5.0, rows=(1,))], Mean())
    2.0
    """


@dataclass(frozen=True)
class Sum:
    """A rule for `gather`: add up a leaf over all micro-batches. It is a number or a tensor, as for `Mean`.

    >>> from microbatch import Batch, gather
    >>> gather([Batch(3), Batch(4)], Sum())
    7
    """


Rule = Split | Replicate | Entries | Mean | Sum | None

ROWS = Split(0)
"""The default rule of a tensor. `gather` checks rows only for this object, and not for an explicit `Split(0)`."""


def resolve_rule(rule: Rule, batch: Any) -> Rule:
    """Return the rule with its `counts` evaluated for this mini-batch if they are a function."""
    if isinstance(rule, Split) and callable(rule.counts):
        return Split(dim=rule.dim, counts=rule.counts(batch))
    return rule


def wraps(leaf: Any) -> bool:
    return isinstance(leaf, Split | Replicate | Entries) and leaf.value is not NoValue
