"""What may become of a leaf: the words of a spec."""

from dataclasses import dataclass, field
from typing import Any


class Nothing:
    """Stands for the value of a rule that goes without one, since None is a value too."""


def _is_constant(value: Any) -> bool:
    return value is Nothing or isinstance(value, bool | int | float | complex | str | bytes | None)


@dataclass(frozen=True, init=False, repr=False)
class Split:
    """A rule: the tensor is cut, and concatenated, along `dim`. Or a value with this rule.

    In a spec, `Split(1)` says it of the leaf or branch in its place. Around an argument, `Split(x, dim=1)` says it of
    `x`, and the micro-batches have the bare part of `x` there. Without either every tensor is split along dimension 0.

    Raises:
        TypeError: neither a dimension nor anything that could be split.

    >>> import torch
    >>> from microbatch import scatter
    >>> [batch.value.shape for batch in scatter(Split(torch.ones(2, 3), dim=1), 3)]
    [torch.Size([2, 1]), torch.Size([2, 1]), torch.Size([2, 1])]
    """

    dim: int
    value: Any = field(compare=False)

    def __init__(self, value: Any = Nothing, dim: int | None = None) -> None:
        if dim is None:
            value, dim = (Nothing, value) if _is_constant(value) else (value, 0)
            dim = 0 if dim is Nothing else dim
        if type(dim) is not int:
            raise TypeError(f"dim of Split is {dim!r}; expected an integer, as in Split(1) or Split(x, dim=1)")
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "dim", dim)

    def __repr__(self) -> str:
        return f"Split({self.dim})" if self.value is Nothing else f"Split({self.value!r}, dim={self.dim})"


@dataclass(frozen=True, repr=False)
class Replicate:
    """A rule: the leaf goes whole into every micro-batch. Or a value with this rule, as in `Replicate(mask)`.

    All micro-batches share it, so it must not be changed in place. Gradients add up. In `gather` it must be the same
    in all micro-batches, and the first is taken.
    """

    value: Any = field(default=Nothing, compare=False)

    def __repr__(self) -> str:
        return "Replicate()" if self.value is Nothing else f"Replicate({self.value!r})"


@dataclass(frozen=True)
class Mean:
    """A rule for `gather`: the mean over all rows, of a leaf that is a mean over the rows of its micro-batch.

    Each micro-batch counts as many times as it has rows. The leaf is a tensor of any one shape, or a number.
    """


@dataclass(frozen=True)
class Sum:
    """A rule for `gather`: the sum of the leaf over all micro-batches; a tensor of any one shape, or a number."""


Rule = Split | Replicate | Mean | Sum | None

ROWS = Split(0)
"""The rule of a tensor that nobody said anything of. `gather` checks the rows of this one only, known by identity."""


def wraps(leaf: Any) -> bool:
    """Whether `leaf` is a value with its rule around it."""
    return isinstance(leaf, Split | Replicate) and leaf.value is not Nothing
