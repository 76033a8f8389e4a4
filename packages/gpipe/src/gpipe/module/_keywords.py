"""Bind the arguments of ``step`` and ``evaluate`` to the first layer."""

from __future__ import annotations

from inspect import Parameter, Signature
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..engine._loss_value import LossFunction
from ..values._leaves import Arguments, as_arguments
from ._arguments import closest_name
from ._signature import get_signature


class NOTHING:
    """The default of an argument that may also be None."""


_ANYTHING = Signature([Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)])
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Call(NamedTuple):
    """A call of ``step`` or ``evaluate``.

    Attributes:
        method: ``"step"`` or ``"evaluate"``.
        input: the first positional argument; :class:`NOTHING` if it was omitted.
        target: the second positional argument, or None.
        arguments: all keywords that are not the method's, so they are for the first layer.
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
        """The ``normalizer`` as a number, after validating it and ``reduction``."""
        if self.reduction not in (None, "mean", "sum"):
            raise ValueError(f"reduction must be 'mean', 'sum' or None; got {self.reduction!r}")
        if self.normalizer is None:
            return 1.0
        divisor = _number(self.normalizer)
        if divisor == 0:
            raise ValueError("normalizer must not be 0: the sum of all losses is divided by it")
        if self.reduction != "sum":
            raise ValueError("normalizer requires reduction='sum': the sum of all losses is divided by it")
        return divisor

    @property
    def options(self) -> list[str]:
        return [*self._fields[4:], *(["schedule"] if self.method == "step" else [])]


def get_mini_batch(call: Call) -> Any:
    """Return the mini-batch of a call, without checks; :class:`NOTHING` if it has none."""
    if not call.arguments:
        return call.input
    args, kwargs = Arguments((), {}) if call.input is NOTHING else as_arguments(call.input)
    return Arguments(tuple(args), {**kwargs, **call.arguments})


def _number(normalizer: Any) -> float:
    is_one = isinstance(normalizer, Real) or (isinstance(normalizer, Tensor) and normalizer.numel() == 1)
    if not is_one or (isinstance(normalizer, Tensor) and normalizer.is_complex()):
        raise TypeError(f"normalizer must be a real number, or a tensor of one; got {normalizer!r}")
    return float(normalizer)


def bind_arguments(layer: nn.Module, call: Call) -> Any:
    """Return the mini-batch in the form that the first ``layer`` accepts. A mapping is one argument, as for any module.

    Raises:
        TypeError: an argument is missing, unknown, or passed twice.
    """
    if not call.arguments:
        if call.input is NOTHING:
            raise TypeError(
                f"{call.method}() needs a mini-batch: {call.method}(x, ...), or {call.method}(**batch) if the first "
                "layer takes keywords"
            )
        return call.input
    inputs, kwargs = get_mini_batch(call), {} if call.input is NOTHING else as_arguments(call.input)[1]
    # Checked here, because the layer would raise on a worker, after the batch was split and moved.
    signature = get_signature(layer) or _ANYTHING
    problem = _problem(signature, inputs, call)
    if problem or kwargs.keys() & call.arguments.keys():
        raise TypeError(
            f"the first layer is {type(layer).__name__}.forward{signature}; the arguments of "
            f"{call.method}() do not fit: {problem or 'its input contains some of the keywords; pass them once'}"
        )
    return inputs


def _problem(signature: Signature, inputs: Arguments, call: Call) -> str:
    """Return the problem with passing ``inputs`` to a function with this ``signature``; empty if there is none."""
    names = {name for name, parameter in signature.parameters.items() if parameter.kind in _BY_NAME}
    clashing = sorted(names & {"target", *call.options})
    if clashing:
        return (
            f"{', '.join(map(repr, clashing))} could also be an argument of {call.method}(); pass the layer's "
            f"arguments as {call.method}(Arguments(args, kwargs), target, ...)"
        )
    # A layer with **kwargs may ignore a misspelled keyword.
    for name in inputs.kwargs.keys() - names:
        if meant := closest_name(name, call.options):
            return f"{name!r} is not a keyword of {call.method}(); did you mean {meant!r}?"
    try:
        signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        return f"{error}; omit arguments that it does not accept"
    return ""
