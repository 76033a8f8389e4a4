"""Skip connections for torch.distributed.pipelining, which has none: a stage hands them on beside its output.

The same vocabulary as `gpipe.skip`; the layers work inside of a :class:`Stage` only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

Layer = TypeVar("Layer", bound=type)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[Layer], Layer]:
    def decorate(layer: Layer) -> Layer:
        layer.stashed, layer.popped = list(stash), list(pop)  # type: ignore[attr-defined]
        return layer

    return decorate


def stash(name: str, tensor: Tensor) -> tuple[str, Tensor | None]:
    return name, tensor


def pop(name: str) -> tuple[str, Tensor | None]:
    return name, None


class Stage(nn.Sequential):
    """Layers that take `(x, *those in incoming)` and give `(x, *those in outgoing)`."""

    incoming: list[str]
    outgoing: list[str]

    def forward(self, x: Tensor, *skips: Tensor) -> Any:
        for skip in skips:
            if skip.requires_grad:
                skip.register_hook(Tensor.contiguous)  # gloo sends nothing else
        held = dict(zip(self.incoming, skips, strict=True))
        for layer in self:
            result = layer(x)
            x = _driven(result, held) if isinstance(result, Generator) else result
        return (x, *(held[name] for name in self.outgoing)) if self.outgoing else x


def connect(stages: list[Stage]) -> None:
    """Find out what has to cross each border."""
    crossing: list[str] = []
    for stage in stages:
        stage.incoming = list(crossing)
        for layer in stage:
            crossing = [name for name in crossing if name not in getattr(layer, "popped", ())]
            crossing += getattr(layer, "stashed", ())
        stage.outgoing = list(crossing)


def _driven(steps: Generator[tuple[str, Tensor | None], Tensor | None, Tensor], held: dict[str, Tensor]) -> Tensor:
    answer = None
    while True:
        try:
            name, tensor = steps.send(answer)
        except StopIteration as end:
            return end.value
        if tensor is None:
            answer = held.pop(name)
        else:
            held[name], answer = tensor, None
