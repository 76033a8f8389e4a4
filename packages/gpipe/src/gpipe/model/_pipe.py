"""A pipe of a model whose own forward runs, once per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from .._batchnorm import DeferredBatchNorm
from .._chooser import Chooser
from .._gpipe import GPipe
from ..engine._offloaded import Offload
from ..engine._run_lock import RunLock
from ..engine._workers import Workers
from ..module._arguments import Device, check_devices, check_flag, check_offload, check_places
from ..module._devices import untouched_on_failure
from ..module._frequencies import expect_sums
from ..module._init import get_initializer, take_off_hooks
from ..module._modes import check_modes, expect_fitting
from ..module._partition import place_partitions
from ..module._rule import SeenSums
from ..module._signature import class_for
from ..module._tied import expect_shareable
from ..module._transforms import not_compiled, refuse_transforms
from ..skip import inspect_skip_layout
from ..transport._copy import CopyStreams
from ..values._leaves import as_value
from ._blocks import Blocks, Costs, Division
from ._division import divide_model, seconds_on
from ._generate import generate
from ._inner import through
from ._instance import InstanceOfModel
from ._moved import on_last_device
from ._parts import build_parts
from ._past import Past
from ._pick import Pick, picker
from ._pipeline import ModelPipeline
from ._stage import DividedModel, ModelStage
from ._stepping import ModelStepping, expect_own_forward


class ModelPipe(InstanceOfModel, ModelStepping, GPipe, of_models=True):
    """The pipe that :class:`gpipe.GPipe` creates from a model other than an ``nn.Sequential``.

    Attributes:
        balance: the number of blocks per stage.
        block_names: the names, in the model, of the modules whose calls may split its forward.
    """

    _ANEW = "; make a new pipe of the model: GPipe(pipe[:], devices=...); the same optimizer may go on"

    def __init__(
        self,
        module: nn.Module,
        balance: Iterable[int] | None = None,
        *,
        sample: Any = None,
        devices: Iterable[Device] | None = None,
        chunks: int = 1,
        checkpoint: str | Sequence[str] = "except_last",
        deferred_batch_norm: bool = False,
        in_spec: Any = None,
        out_spec: Any = None,
        init: Any = None,
        blocks: str | Sequence[str] | None = None,
        pick: str | Callable[[Any], Any] | None = None,
        offload: Offload = False,
    ) -> None:
        nn.Module.__init__(self)
        self.__dict__["_offload"] = check_offload(offload)
        initializer, picked = get_initializer(init), picker(pick)
        self.in_spec, self.out_spec = in_spec, out_spec
        self.chunks = chunks
        modes = check_modes(checkpoint)
        deferred = check_flag("deferred_batch_norm", deferred_batch_norm)
        expect_own_forward(module)
        expect_sums(module, self.chunks)
        with untouched_on_failure(module):
            kept = take_off_hooks(module)
            if deferred:
                module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
            division = _division(module, balance, devices, blocks, sample, picked)
            places = check_places(devices, len(division.balance))
            parts = build_parts(module, division)
            expect_shareable(parts, places)
            layers = {name: layer for part in parts for name, layer in part.named_children()}
            place_partitions(layers, parts, places, initializer or kept, 0, offload=bool(self._offload))
        has_deferred = any(isinstance(each, DeferredBatchNorm) for each in module.modules())
        self.__dict__.update(
            _checkpoint=expect_fitting(modes, len(places)),
            _balance=division.balance,
            _devices=places,
            _blocks=division.blocks,
            _division=division,
            _pick=picked,
            _least_rows=2 if has_deferred else 1,
            _model=module,
            _partitions=nn.ModuleList(parts),
        )
        # Share the dicts themselves, so that attributes set on the model later also belong to the pipe.
        self.__dict__.update({name: vars(module)[name] for name in _REGISTERED})
        self.__dict__.update({name: each for name, each in vars(module).items() if "state_dict" in name})
        self._prepare()

    @property
    def block_names(self) -> list[str]:
        """The names of the blocks."""
        return [*self._blocks]

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the model, in a pipeline.

        The model's own forward runs once per micro-batch, and ends after its last block. The operations after the last
        block and between blocks then run once more for the full mini-batch, on the joined outputs of the blocks. So the
        output matches the model's output. With an ``out_spec``, the forward of each micro-batch runs to its end, and
        the outputs are joined.

        Args:
            args, kwargs: the arguments of the model; tensors are split into micro-batches.

        Returns:
            The output of the model for the full mini-batch, on the last device.
        """
        refuse_transforms()
        return self._compute_module(self._get_pipeline(), as_value(args, kwargs), self.out_spec)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._past.entered(self._compute) if "forward" in vars(self) else nullcontext():
            return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model. Modules around blocks compute in the pipeline when they are called."""
        found = super().__getattr__(name)
        return through(self, found) if "_past" in vars(self) else found

    @not_compiled
    def _compute(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the output of ``module``, a part of the model around blocks, computed in the pipeline."""
        refuse_transforms()
        pipelines = self._pipelines
        if module not in pipelines:
            pipelines[module] = self._get_pipeline().of(module)
        return self._compute_module(pipelines[module], as_value(args, kwargs), None)

    @property
    def _run_lock(self) -> RunLock:
        return self._workers.run_lock

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the model's ``generate()``. The stages take turns on the full mini-batch.

        Raises:
            RuntimeError: parameters are on the host, but stages on other devices (``offload=True``).
        """
        if self._offload and any(device.type != "cpu" for device in self._devices):
            raise RuntimeError(
                "generate() reads every parameter for each token, but offload=True keeps them on the host; generate "
                "with a pipe of the same model that is made without offload="
            )
        blocks = {*self._blocks.values()}
        return self._run_lock.run(lambda: generate(self._whole_model, blocks, *args, **kwargs))

    def close(self) -> None:
        """End the threads of this pipe, which otherwise end when it is freed. The next use starts new ones."""

        def close() -> None:
            self._workers.close()
            self._get_pipeline().threads.close()

        self._run_lock.run(close)

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._blocks.values())

    def __getitem__(self, index: int | slice) -> nn.Module:
        """Return a block, or the model for ``[:]``."""
        if not isinstance(index, slice):
            return [*self._blocks.values()][index]
        if index != slice(None):
            raise TypeError("a pipe of a model has no parts that are models: pipe[:] is the model, pipe[3] a block")
        return self._whole_model

    def _prepare(self) -> None:
        parts, devices = [*self._partitions], self._devices
        layout = inspect_skip_layout(parts)
        stages = [
            ModelStage(j, part, device, layout) for j, (part, device) in enumerate(zip(parts, devices, strict=True))
        ]
        streams, workers = [CopyStreams.on(device) for device in devices], Workers(devices)
        divided = DividedModel(self._whole_model, self._division, self._pick, parts, stages)
        pipeline = ModelPipeline(divided, layout, streams, workers, offload=self._offload)
        self.__dict__.update(
            _copy_streams=streams, _workers=workers, _sums=SeenSums(), _pipeline=pipeline, _chooser=Chooser(stages)
        )
        on_device = partial(on_last_device, devices, self._offload)
        past = Past(self._whole_model, self._blocks, workers.run_lock, on_device)
        self.__dict__.update(_laid_out=[], _pipelines={}, _past=past)
        # Each signature has its own class, because frameworks read argument names from type(model).forward.
        object.__setattr__(
            self, "__class__", class_for(type(self), ModelPipe.forward, self._whole_model, is_model=True)
        )


def _division(
    model: nn.Module,
    balance: Iterable[int] | None,
    devices: Iterable[Device] | None,
    names: str | Sequence[str] | None,
    sample: Any,
    pick: Pick,
) -> Division:
    given = None if devices is None else [*devices]

    def places() -> Sequence[torch.device]:
        return check_devices(given, 1 if given is None else sum(1 for _ in model.modules()))

    def seconds(blocks: Blocks) -> Costs | None:
        return seconds_on(places(), model, blocks, sample, pick)

    return divide_model(model, balance, names, lambda: len(places()), sample, seconds)


_REGISTERED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
