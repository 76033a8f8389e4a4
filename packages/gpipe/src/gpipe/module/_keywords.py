"""The arguments of the first layer, from those of ``step`` and ``evaluate``: keywords, or one value."""

from __future__ import annotations

from inspect import Parameter, Signature
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..engine._loss_value import LossFunction
from ..values._leaves import Arguments, as_arguments
from ._arguments import meant_by
from ._signature import signature_of


class NOTHING:
    """The default of an argument that may also be None."""


_ANYTHING = Signature([Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)])
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Call(NamedTuple):
    """A call of ``step`` or ``evaluate``.

    Attributes:
        method: which of both.
        input: the first positional argument; :data:`NOTHING` if there is none.
        target: the second positional argument, or None.
        arguments: keywords that are not the method's own, hence those of the first layer.
    """

    method: str
    input: Any
    target: Any
    arguments: dict[str, Any]
    loss_fn: LossFunction | None
    reduction: str | None
    normalizer: float | Tensor | None
    return_outputs: bool

    @property
    def trains(self) -> bool:
        return self.method == "step"

    @property
    def divisor(self) -> float:
        """The ``normalizer`` as a number, checked, with ``reduction``."""
        if self.reduction not in (None, "mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', or left out; got {self.reduction!r}")
        if self.normalizer is None:
            return 1.0
        divisor = _number(self.normalizer)
        if divisor == 0:
            raise ValueError("normalizer must not be 0: it is what the sum of all losses is divided by")
        if self.reduction != "sum":
            raise ValueError("normalizer goes with reduction='sum'; it is what the sum of all losses is divided by")
        return divisor

    @property
    def options(self) -> list[str]:
        return [*self._fields[4:], *(["schedule"] if self.method == "step" else [])]


def given_to(call: Call) -> Any:
    """The mini-batch of a call, not checked: :data:`NOTHING` if there is none."""
    if not call.arguments:
        return call.input
    args, kwargs = Arguments((), {}) if call.input is NOTHING else as_arguments(call.input)
    return Arguments(tuple(args), {**kwargs, **call.arguments})


def _number(normalizer: Any) -> float:
    is_one = isinstance(normalizer, Real) or (isinstance(normalizer, Tensor) and normalizer.numel() == 1)
    if not is_one or (isinstance(normalizer, Tensor) and normalizer.is_complex()):
        raise TypeError(f"normalizer must be a real number, or a tensor of one; got {normalizer!r}")
    return float(normalizer)


def called_with(layer: nn.Module, call: Call) -> Any:
    """The mini-batch as the first ``layer`` takes it; TypeError if an argument is missing, unknown, or given twice.

    A mapping is one argument, as in a call of any module; keywords are given by ``**``.
    """
    if not call.arguments:
        if call.input is NOTHING:
            raise TypeError(
                f"{call.method}() needs a mini-batch: {call.method}(x, ...), or {call.method}(**batch) if the first "
                "layer takes keywords"
            )
        return call.input
    inputs, kwargs = given_to(call), {} if call.input is NOTHING else as_arguments(call.input)[1]
    # Asked here and not left to the layer, which fails on a worker, after the batch was cut and moved.
    signature = signature_of(layer) or _ANYTHING
    problem = _problem(signature, inputs, call)
    if problem or kwargs.keys() & call.arguments.keys():
        raise TypeError(
            f"the first layer is {type(layer).__name__}.forward{signature}; the arguments of "
            f"{call.method}() do not fit: {problem or 'some keywords are in its input too; pass them once'}"
        )
    return inputs


def _problem(signature: Signature, inputs: Arguments, call: Call) -> str:
    """What is wrong if ``inputs`` are passed to what has this ``signature``; empty if nothing is."""
    names = {name for name, parameter in signature.parameters.items() if parameter.kind in _BY_NAME}
    clashing = sorted(names & {"target", *call.options})
    if clashing:
        return (
            f"{', '.join(map(repr, clashing))} can be meant for {call.method}() too; give what is the layer's as "
            f"{call.method}(Arguments(args, kwargs), target, ...)"
        )
    # A layer may take any keywords, and ignore them.
    for name in inputs.kwargs.keys() - names:
        if meant := meant_by(name, call.options):
            return f"{name!r} is no keyword of {call.method}(); did you mean {meant!r}?"
    try:
        signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        return f"{error}; leave out what it does not take"
    return ""
