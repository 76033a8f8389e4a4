"""The layers of a pipe: registered under the names that they have in the model, and listed by partition."""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeVar

from torch import nn

from ..engine._pipeline import Pipeline
from ..engine._walks import Size
from ..schedule import checkpoint_stops
from ._modes import Modes
from ._names import divide_names, tree_of

Pipe = TypeVar("Pipe", bound="Divided")


class Divided(nn.Module):
    """The part of a pipe that holds its layers."""

    _balance: list[int]
    _checkpoint: Modes
    _partitions: nn.ModuleList
    _pipeline: Pipeline
    _model: nn.Module | None = None
    """The model that the layers belong to, or the part of it that is in this process."""
    _laid_out: list[list[nn.Module]]
    """The layers of each partition that the stages were made of."""
    _ANEW = "; make a new pipe of its layers or others: GPipe(pipe[:], balance=...); the same optimizer may go on"

    def _take(self, partitions: nn.ModuleList, layers: nn.Sequential) -> None:
        """Register the layers of ``partitions``, so that every name is the wrapped module's, whatever the balance.

        Of layers from inside of a model, its own modules are registered, in its own order.
        """
        model = tree_of(layers, partitions)
        if model is None:
            for partition in partitions:
                self._modules.update(partition._modules)  # where a layer may have the name of an attribute
        else:
            # The dicts themselves, so that whatever is set on the model later is the pipe's too.
            self.__dict__.update({name: vars(model)[name] for name in _REGISTERED})
        # Not registered, hence past nn.Module.__setattr__: a second view of the same layers. The model comes first, so
        # that it is copied before the layers that look at it.
        self.__dict__.update(_model=model, _partitions=partitions)

    @property
    def balance(self) -> list[int]:
        """The number of layers of each partition of the model."""
        return list(self._balance)

    @property
    def partitions(self) -> nn.ModuleList:
        """The layers in this process by partition: a view, which must not be changed."""
        return self._partitions

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", {}):
            raise TypeError(f"layer {name!r} of a pipe cannot be replaced{self._ANEW}")
        super().__setattr__(name, value)

    def _held(self) -> list[list[nn.Module]]:
        return [list(partition._modules.values()) for partition in self._partitions]  # type: ignore[arg-type]

    def _expect_layers(self) -> None:
        """Before a run: expect the layers that the stages were made of."""
        held = self._held()
        moved = self._model is None and list(self._modules.values()) != list(chain.from_iterable(held))
        if moved or held != self._laid_out:
            raise RuntimeError(
                "the layers of this pipe, or of its partitions, are not those that it was made of: some were added, "
                f"removed or replaced{self._ANEW}"
            )

    def _layers(self) -> dict[str, nn.Module]:
        return {name: layer for partition in self._partitions for name, layer in partition.named_children()}

    def _end(self, at: int) -> nn.Module:
        """The first layer of this process for 0, the last for -1."""
        layer = [*self._partitions[at]._modules.values()][at]
        assert layer is not None
        return layer

    def train(self: Pipe, mode: bool = True) -> Pipe:
        """Set the mode of the layers, as any module does."""
        super().train(mode)
        self._partitions.train(mode)
        return self

    @property
    def training(self) -> bool:
        """Whether the pipe is in training mode; of a model, whether that is."""
        mode: bool = vars(self)["training"] if self._model is None else self._model.training
        return mode

    @training.setter
    def training(self, mode: bool) -> None:
        vars(self if self._model is None else self._model)["training"] = mode

    def _follow_model(self, inputs: Any, part: nn.Module | None = None) -> None:
        """Before a run: expect the layers that the stages were made of. RuntimeError if one was replaced."""
        self._expect_layers()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        divide_names(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _size(self, microbatches: int, *, trains: bool) -> Size:
        """The size of a run; nothing is checkpointed in evaluation mode, nor where no backward follows."""
        modes = self._checkpoint if self.training and trains else "never"
        return self._pipeline.size(microbatches, checkpoint_stops(modes, microbatches, len(self._balance)))


_REGISTERED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
