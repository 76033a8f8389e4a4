"""The arguments of the first layer, from those of ``step`` and ``evaluate``: keywords, or one value."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from torch import nn

from .._flatten._names import model_of
from ..values._leaves import Arguments
from ._signature import signature_of


class _Nothing:
    """The default of an argument that may also be None."""

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING = _Nothing()

_ANYTHING = Signature([Parameter("args", Parameter.VAR_POSITIONAL), Parameter("kwargs", Parameter.VAR_KEYWORD)])
_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Call(NamedTuple):
    """A call of a method of a pipe that takes a mini-batch and a target.

    Attributes:
        method: the name of the method.
        options: the names of the method's own keywords.
        input: the first positional argument; :data:`NOTHING` if there is none.
        target: the second positional argument, or None.
        arguments: keywords that are not the method's own.
    """

    method: str
    options: Sequence[str]
    input: Any
    target: Any
    arguments: dict[str, Any]


def as_value(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as one value: a single positional one itself, several as :class:`Arguments`."""
    return args[0] if len(args) == 1 and not kwargs else Arguments(args, kwargs)


def as_arguments(value: Any) -> Arguments:
    """The arguments that :func:`as_value` has made one value of."""
    return value if isinstance(value, Arguments) else Arguments((value,), {})


def called_with(layer: nn.Module, call: Call) -> tuple[Any, Any]:
    """The mini-batch as the first ``layer`` takes it, and the target.

    A mapping is one argument, as in a call of any module; keywords are given by ``**``.

    Raises:
        TypeError: an argument is missing, unknown, given twice, or one of both the method and the layer.
    """
    if not call.arguments and call.input is not NOTHING:
        return call.input, call.target
    signature = signature_of(layer) or _ANYTHING
    call = _own_taken(signature, call)
    _expect_no_clash(layer, signature, call)
    if call.input is NOTHING and not call.arguments:
        raise TypeError(
            f"{call.method}() needs a mini-batch: {call.method}(x, ...), or {call.method}(**batch) if the first layer "
            "takes keywords"
        )
    if not call.arguments:
        return call.input, call.target
    inputs = _joined(call)
    _expect_taken(layer, signature, inputs, call)
    return inputs, call.target


def _own_taken(signature: Signature, call: Call) -> Call:
    """``call`` with ``input=`` and ``target=`` where they belong if they are no arguments of the layer."""
    arguments, names = dict(call.arguments), _names(signature)
    first = next(iter(signature.parameters), None)
    if "input" in arguments and call.input is NOTHING and ("input" not in names or first == "input"):
        call = call._replace(input=arguments.pop("input"))
    positionally = call.input is not NOTHING and set(arguments) == {"target"}
    if "target" in arguments and call.target is None and ("target" not in names or positionally):
        call = call._replace(target=arguments.pop("target"))
    return call._replace(arguments=arguments)


def _expect_no_clash(layer: nn.Module, signature: Signature, call: Call) -> None:
    own = {*call.options, "target"} if "target" in call.arguments else {*call.options}
    clashing = sorted(own & _names(signature)) if call.arguments else []
    if clashing:
        raise TypeError(
            f"{', '.join(map(repr, clashing))} can be meant for {call.method}(), and for the first layer, "
            f"{_name(layer)}, which takes an argument of that name; give the layer's as "
            f"{call.method}(Arguments(args, kwargs), target, ...)"
        )


def _names(signature: Signature) -> set[str]:
    return {name for name, parameter in signature.parameters.items() if parameter.kind in _BY_NAME}


def _joined(call: Call) -> Arguments:
    """The positional argument and the keywords as one value."""
    args, kwargs = Arguments((), {}) if call.input is NOTHING else as_arguments(call.input)
    twice = sorted(kwargs.keys() & call.arguments.keys())
    if twice:
        raise TypeError(
            f"{call.method}() got {', '.join(map(repr, twice))} as a keyword and in its input; pass it once"
        )
    return Arguments(tuple(args), {**kwargs, **call.arguments})


def _expect_taken(layer: nn.Module, signature: Signature, inputs: Arguments, call: Call) -> None:
    problem = _misspelt(signature, inputs, call)
    try:
        signature.bind(*inputs.args, **inputs.kwargs)
    except TypeError as error:
        problem = problem or str(error)
    if problem:
        raise TypeError(
            f"the first layer is {_name(layer)}.forward{_bare(signature)}; {call.method}() was given "
            f"{_described(inputs)} for it: {problem}; leave out what it does not take"
        )


def _misspelt(signature: Signature, inputs: Arguments, call: Call) -> str:
    """What is wrong if a keyword is nearly one of the method's own: a layer may take any, and ignore it."""
    for name in inputs.kwargs.keys() - _names(signature):
        for meant in get_close_matches(name, call.options, 1, cutoff=0.85):
            return f"{name!r} is no keyword of {call.method}(); did you mean {meant!r}?"
    return ""


def _bare(signature: Signature) -> Signature:
    """Without annotations, which may be long."""
    parameters = [each.replace(annotation=Parameter.empty) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=Signature.empty)


def _described(inputs: Arguments) -> str:
    positional = f"{len(inputs.args)} positional" if inputs.args else ""
    named = f"keywords {', '.join(inputs.kwargs)}" if inputs.kwargs else ""
    return " and ".join(filter(None, (positional, named))) or "nothing"


def _name(layer: nn.Module) -> str:
    return type(model_of(layer) or layer).__name__
