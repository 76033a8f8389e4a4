"""The layers that a plan divides: of an ``nn.Sequential``, or the blocks of a model with its own forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor, nn

from microbatch import Arguments, map_tensors
from profiler.fake import blank, blank_layer

from .._gpipe import GPipe
from .._torch import stay_in_place
from ..model._blocks import Division
from ..model._division import divide_model
from ..model._parts import build_parts
from ..model._stepping import expect_own_forward
from ..module._inputs import Inputs
from ..module._partition import expect_sequential, refuse_duplicate_layers


@dataclass(frozen=True)
class Planned:
    """A model and its layers.

    Attributes:
        module: the model.
        layers: the modules of each layer, by name. A block includes the modules outside blocks that the model uses
            after it.
        named: the layers or blocks themselves, by name.
        division: the blocks; None for an ``nn.Sequential``.
        example: an input that shows the order in which the model uses its modules; None if nothing depends on it.
    """

    module: nn.Module
    layers: Mapping[str, nn.Module]
    named: Mapping[str, nn.Module]
    division: Division | None = None
    example: Any = field(default=None, repr=False)

    @property
    def names(self) -> list[str]:
        return [*self.layers]

    def pipe(self, module: nn.Module, sizes: Sequence[int], **options: Any) -> GPipe:
        """Return a pipe of ``module``, which is the model or a copy of it."""
        if self.division is None:
            return GPipe(module, sizes, **options)
        return GPipe(module, sizes, blocks=self.names, sample=self.example, **options)

    def faked(self, mode: Any) -> nn.Module:
        """Return a copy with fake tensors. Tensors that the model shares are also shared in the copy."""
        copied = blank_layer(self.module, mode)
        for module in copied.children() if self.division is None else islice(copied.modules(), 1, None):
            stay_in_place(module)
        return copied

    def blank(self, value: Any, mode: Any) -> Any:
        """Return ``value`` with fake tensors.

        For a model with its own forward, integer and boolean tensors keep their values, since the code between its
        blocks may read them.
        """
        return map_tensors(lambda x: x if self._is_kept(x) else blank(x, mode), value)

    def _is_kept(self, tensor: Tensor) -> bool:
        is_number = tensor.is_floating_point() or tensor.is_complex()
        return self.division is not None and not is_number and not tensor.is_meta


def find_layers(module: nn.Module, sample: Any, stages: Callable[[int], int]) -> Planned:
    """Return the layers of a model.

    Args:
        module: the model.
        sample: an input of the model.
        stages: returns the number of stages to plan for, given the largest possible number.
    """
    if isinstance(module, nn.Sequential):
        expect_sequential(module)
        refuse_duplicate_layers(module._modules.items())  # check before measuring: a pipe would reject them
        layers = dict(module.named_children())
        return Planned(module, layers, layers)
    expect_own_forward(module)
    most = sum(1 for _ in module.modules())
    division = divide_model(module, None, None, lambda: stages(most), sample)
    each = division._replace(balance=[1] * len(division.blocks))
    layers = dict(zip(division.blocks, build_parts(module, each), strict=True))
    return Planned(module, layers, division.blocks, each, sample if division.after else None)


def as_input(module: nn.Module, value: Any) -> Any:
    """Return ``value`` as the input of a step: for a model with its own forward, an ``Arguments`` object."""
    if isinstance(module, nn.Sequential) or isinstance(value, Arguments):
        return value
    return Arguments(*Inputs.of(value))
