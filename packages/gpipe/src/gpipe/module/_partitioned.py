"""The layers of a pipe, registered under the model's names and grouped by partition."""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeVar

from torch import nn

from ..engine._pipeline import Pipeline
from ..engine._worker_steps import Size
from ..schedule import checkpoint_stops
from ..schedule._modes import offloading_stages
from ._modes import Modes
from ._names import divide_names, extract_model

Pipe = TypeVar("Pipe", bound="PartitionedModule")


class PartitionedModule(nn.Module):
    """Hold the layers of a pipe."""

    _balance: list[int]
    _checkpoint: Modes
    _partitions: nn.ModuleList
    _pipeline: Pipeline
    _model: nn.Module | None = None
    """The model that contains the layers, or the part of it that is in this process."""
    _laid_out: list[list[nn.Module]]
    """The layers of each partition when the stages were created."""
    _ANEW = "; build a new pipe, as in GPipe(pipe[:], balance=...), and keep the optimizer"

    def _take(self, partitions: nn.ModuleList, layers: nn.Sequential) -> None:
        """Register the layers of ``partitions`` under the names of the wrapped module, whatever the balance.

        If the layers were taken out of a model, its modules are registered instead, in their order in the model.
        """
        model = extract_model(layers, partitions)
        if model is None:
            for partition in partitions:
                self._modules.update(partition._modules)  # not add_module: a layer may have the name of an attribute
        else:
            # The dicts themselves, so that later changes of the model also apply to the pipe.
            self.__dict__.update({name: vars(model)[name] for name in _REGISTERED})
        # Set without nn.Module.__setattr__, which would register the layers twice. The model is the first entry, so
        # that deepcopy copies it before the layers that refer to it.
        self.__dict__.update(_model=model, _partitions=partitions)

    @property
    def balance(self) -> list[int]:
        """The number of layers of each partition of the model."""
        return list(self._balance)

    @property
    def partitions(self) -> nn.ModuleList:
        """The layers in this process by partition: a view that must not be modified."""
        return self._partitions

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", {}):
            raise TypeError(f"layer {name!r} of a pipe cannot be replaced{self._ANEW}")
        super().__setattr__(name, value)

    def _list_layers(self) -> list[list[nn.Module]]:
        return [list(partition._modules.values()) for partition in self._partitions]  # type: ignore[arg-type]

    def _expect_layers(self) -> None:
        """Raise RuntimeError if layers were added, removed or replaced since the stages were created."""
        held = self._list_layers()
        moved = self._model is None and list(self._modules.values()) != list(chain.from_iterable(held))
        if moved or held != self._laid_out:
            raise RuntimeError(
                "layers of this pipe, or of its partitions, were added, removed or replaced after it was created"
                f"{self._ANEW}"
            )

    def _layers(self) -> dict[str, nn.Module]:
        return {name: layer for partition in self._partitions for name, layer in partition.named_children()}

    def _end(self, at: int) -> nn.Module:
        """Return the first layer of this process for 0, the last for -1."""
        layer = [*self._partitions[at]._modules.values()][at]
        assert layer is not None
        return layer

    def train(self: Pipe, mode: bool = True) -> Pipe:
        """Set the training mode of all layers, as for any module."""
        super().train(mode)
        self._partitions.train(mode)
        return self

    @property
    def training(self) -> bool:
        """True in training mode; a pipe of a model has the mode of the model."""
        mode: bool = vars(self)["training"] if self._model is None else self._model.training
        return mode

    @training.setter
    def training(self, mode: bool) -> None:
        vars(self if self._model is None else self._model)["training"] = mode

    def _follow_model(self, inputs: Any, part: nn.Module | None = None) -> None:
        """Check the layers before a run; RuntimeError if one was replaced."""
        self._expect_layers()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        divide_names(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _size(self, microbatches: int, *, trains: bool) -> Size:
        """Return the size of a run. Without a backward, and in evaluation mode, no mode of ``checkpoint`` applies."""
        modes = self._checkpoint if self.training and trains else "never"
        count = len(self._balance)
        stops = checkpoint_stops(modes, microbatches, count)
        return self._pipeline.size(microbatches, stops, offloading_stages(modes, count))


_REGISTERED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
