"""The arguments of commands: models, mini-batches, devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter


def _not_empty(kind: Any, values: Sequence[Any] | None) -> None:
    if values is not None and not len(values):
        raise ValueError("expected at least one value")


_MANY = Parameter(consume_multiple=True, negative="", validator=_not_empty)
_YES = Parameter(negative="")
_SAMPLE = "A mini-batch: a shape such as 64,3,224,224 or input_ids=8,128:int64:50257, or package.module:function."

Target = Annotated[str, Parameter(help="The model: package.module:name.")]
Sample = Annotated[list[str], _MANY, Parameter(help=_SAMPLE)]
Loss = Annotated[str | None, Parameter(help="The loss: package.module:function, of output and target.")]
LossTarget = Annotated[list[str] | None, _MANY, Parameter(help="The target, as a sample.")]
Texts = Annotated[list[str], _MANY]
Devices = Annotated[tuple[str, ...], _MANY]
Figures = Annotated[list[float] | None, _MANY]
Numbers = Annotated[list[int] | None, _MANY]
Json = Annotated[bool, _YES, Parameter(help="Print JSON.")]
Switch = Annotated[bool, _YES]
