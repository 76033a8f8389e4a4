"""Bundle the positional and keyword arguments of a call into one value."""

from typing import Any, NamedTuple


class Arguments(NamedTuple):
    """The arguments of a call `model(*args, **kwargs)`, unless it has only one positional argument.

    It is a named tuple, so `scatter` splits every argument, and `Arguments((None,), {'mask': Replicate()})` is a spec
    for it.

    >>> import torch
    >>> from microbatch import scatter
    >>> (a, b) = scatter(Arguments((torch.arange(4),), {'mask': torch.ones(4)}), 2)
    >>> a.value.args, a.value.kwargs
    ((tensor([0, 1]),), {'mask': tensor([1., 1.])})
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
