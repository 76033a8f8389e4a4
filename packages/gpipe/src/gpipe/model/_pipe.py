"""A pipe of a model whose own forward runs, once per micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import Batch, map_tensors

from .._batchnorm import DeferredBatchNorm
from .._chooser import Chooser
from .._flatten._cache import expect_documents_apart, without_cache
from .._flatten._generate import generate
from .._flatten._inputs import Inputs
from .._flatten._own_loss import with_whole_count
from .._gpipe import GPipe
from ..engine._loss_value import own_loss
from ..engine._losses import Losses
from ..engine._mini_batch import compute_outputs
from ..engine._workers import Workers
from ..module._arguments import Device, checked_devices, checked_flag, checked_places
from ..module._cut import Checked, checked
from ..module._devices import expect_movable, untouched_on_failure
from ..module._frequencies import expect_sums
from ..module._graphs import expect_no_graphs
from ..module._init import expect_materializable, initializer_of, materialize
from ..module._keywords import Call
from ..module._modes import checked_modes, expect_fitting
from ..module._partition import checked_balance
from ..module._rule import SeenSums
from ..module._signature import class_for
from ..module._step import Asked, Prepared
from ..module._tied import expect_shareable, move_all
from ..module._training import whole_arguments
from ..module._transforms import not_compiled, refuse_transforms
from ..skip import inspect_skip_layout
from ..skip.layout import skippables
from ..transport._copy import CopyStreams
from ..values._leaves import Activation, as_value
from ..values._sharing import gathered
from ._blocks import Blocks, Division, divide, named_blocks
from ._parts import parts_of
from ._pipeline import ModelPipeline
from ._replay import Replay, ReplayedLoss, ordered, returned_itself, used_of
from ._stage import ModelStage


class ModelPipe(GPipe, of_models=True):
    """The pipe that :class:`gpipe.GPipe` creates from a model other than an ``nn.Sequential``, without a ``sample``.

    Attributes:
        balance: the number of blocks per stage.
        block_names: the names, in the model, of the modules whose calls may split its forward.
    """

    _blocks: Blocks
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
    ) -> None:
        nn.Module.__init__(self)
        assert sample is None
        initializer = initializer_of(init)
        if pick is not None:
            raise TypeError("pick= goes with a sample; without one, the output is all that the model returns")
        self.in_spec, self.out_spec = in_spec, out_spec
        self.chunks = chunks
        modes = checked_modes(checkpoint)
        deferred = checked_flag("deferred_batch_norm", deferred_batch_norm)
        expect_own_forward(module)
        expect_sums(module, self.chunks)
        with untouched_on_failure(module):
            if deferred:
                module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
            division = _division(module, balance, devices, blocks)
            places = checked_places(devices, len(division.balance))
            parts = parts_of(module, *division)
            expect_shareable(parts, places)
            if initializer is not None:
                layers = {name: layer for part in parts for name, layer in part.named_children()}
                expect_materializable(layers, places, initializer)
            for j, (part, place) in enumerate(zip(parts, places, strict=True)):
                if initializer is None:
                    expect_movable(part, place, j)
                expect_no_graphs(part, place, j)
            if initializer is not None:
                materialize(parts, places, initializer)
            move_all(parts, places)
        has_deferred = any(isinstance(each, DeferredBatchNorm) for each in module.modules())
        self.__dict__.update(
            _checkpoint=expect_fitting(modes, len(places)),
            _balance=division.balance,
            _devices=places,
            _blocks=division.blocks,
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
        inputs = self._checked(as_value(args, kwargs))
        batches, versions = self._cut(inputs)
        with self._pipeline.section.entered():
            spec = self._pipeline.spec(self._size(len(batches), trains=torch.is_grad_enabled()))
            outputs = compute_outputs(self._pipeline, spec._replace(replays=self.out_spec is None), batches, versions)
            if self.out_spec is not None:
                return gathered(outputs, batches, self.out_spec)
            used = used_of(outputs).value
            with self._shown().divided.answering(), without_cache(self._whole_model):
                return ordered(self._replayed(used, batches, inputs.bare), {*self._devices})

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the model's ``generate()``. The stages take turns on the full mini-batch."""
        with self._workers.section.entered():
            return generate(self._whole_model, {*self._blocks.values()}, *args, **kwargs)

    def close(self) -> None:
        """End the threads of this pipe, which otherwise end when it is freed. The next use starts new ones."""
        with self._workers.section.entered():
            self._workers.close()
            self._shown().threads.close()

    def train(self, mode: bool = True) -> ModelPipe:
        """Set the mode of the model through its own ``train()``."""
        self._whole_model.train(mode)
        return self

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
        pipeline = ModelPipeline(self._whole_model, self._blocks, stages, layout, streams, workers)
        self.__dict__.update(
            _copy_streams=streams, _workers=workers, _sums=SeenSums(), _pipeline=pipeline, _chooser=Chooser(stages)
        )
        self.__dict__["_laid_out"] = []
        # Each signature has its own class, because frameworks read argument names from type(model).forward.
        object.__setattr__(
            self, "__class__", class_for(type(self), ModelPipe.forward, self._whole_model, is_model=True)
        )

    def _end(self, at: int) -> nn.Module:
        return self._whole_model

    def _layers(self) -> dict[str, nn.Module]:
        return dict(self._blocks)

    def _follow_model(self, inputs: Any) -> None:
        """Check before a run that the blocks are still in the model, and adopt its mode."""
        model = self._whole_model
        modules = dict(model.named_modules())
        for name, block in self._blocks.items():
            if modules.get(name) is not block:
                raise RuntimeError(f"block {name!r} of {type(model).__name__} was replaced or removed{self._ANEW}")
        for part in self._partitions:
            part.training = model.training
        expect_documents_apart(model, Inputs.of(inputs))

    @property
    def _whole_model(self) -> nn.Module:
        model = self._model
        assert model is not None
        return model

    def _shown(self) -> ModelPipeline:
        assert isinstance(self._pipeline, ModelPipeline)
        return self._pipeline

    def _replayed(
        self,
        used: Any,
        batches: Sequence[Batch],
        inputs: Any,
        owner_of: Callable[[Tensor], Tensor] = returned_itself,
        pick: Callable[[Any], Any] = returned_itself,
    ) -> Any:
        """Return the output of the model for the full mini-batch, computed from the outputs of blocks that it uses."""
        pipeline = self._shown()
        try:
            facts, rows = pipeline.shown(), [batch.rows[0] for batch in batches]
            replay = Replay(self._whole_model, self._blocks.values(), facts, used, rows, self._devices, owner_of)
            return replay.output(inputs, pick)
        except BaseException:
            pipeline.forget()
            raise

    def _cut_for_loss(self, asked: Asked) -> Asked:
        return asked._replace(batches=self._cut(self._checked(asked.inputs))[0])

    def _checked(self, inputs: Any) -> Checked:
        """Check that ``inputs`` can be split. Each micro-batch receives the number of items of the full mini-batch."""
        return checked(with_whole_count(inputs) if self._cuts_by_name else inputs, self.in_spec)

    def _computes_loss(self, asked: Asked) -> str | None:
        return type(self._whole_model).__name__ if asked.call.loss_fn is None else None

    def _losses(self, asked: Asked, scope: ExitStack, *, whole: bool) -> Losses:
        if not whole or self.out_spec is not None:
            return super()._losses(asked, scope, whole=whole)
        call, batches = asked.call, asked.batches
        picks = call.loss_fn is None and not call.return_outputs
        loss_fn = returned_itself if picks else call.loss_fn or own_loss
        pick = own_loss if picks else returned_itself
        arguments = whole_arguments(call, self._devices[-1])
        self._tell_of_whole(asked)
        inputs = self._checked(asked.inputs).bare
        kept: dict[int, Activation] = {}

        def loss(used: Any, inputs: Any, owner_of: Callable[[Tensor], Tensor], *others: Any) -> Any:
            output = self._replayed(used, batches, inputs, owner_of, pick)
            if call.return_outputs:  # a copy, because loss_fn may modify it
                kept[0] = Activation(map_tensors(lambda tensor: tensor.detach().clone(), output))
            return loss_fn(output, *others)

        unlike = None if call.reduction is None else self._unlike(asked)
        weight = 1.0 / call.divisor
        losses = ReplayedLoss(loss, inputs, arguments, used_of, weight=weight, unlike=unlike)
        losses.outputs = kept
        return losses

    def _returned(self, prepared: Prepared, call: Call) -> Any:
        losses = prepared.losses
        if not (call.return_outputs and isinstance(losses, ReplayedLoss)):
            return super()._returned(prepared, call)
        found = super()._returned(prepared, call._replace(return_outputs=False))
        return *(found if isinstance(found, tuple) else (found,)), losses.outputs[0].value


def expect_own_forward(module: nn.Module) -> None:
    """Raise TypeError unless the forward of ``module`` is Python code that calls modules."""
    if isinstance(module, GPipe):
        raise TypeError("module is a pipe already; make another one of its model or layers: GPipe(pipe[:], ...)")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("module is a ScriptModule, whose forward does not run in Python, where it could be cut")
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        raise TypeError(f"module must have a forward; {type(module).__name__} has none")
    if not any(True for _ in module.children()):
        raise TypeError(
            f"module must be a model that calls modules; got a single {type(module).__name__}; a pipe of one layer is "
            "GPipe(nn.Sequential(layer), [1], ...)"
        )
    if hasattr(module, "_orig_mod"):
        raise TypeError(
            "module was compiled as a whole by torch.compile, so that its forward cannot be cut; compile its blocks"
        )
    if any(True for _ in skippables(module)):
        raise TypeError(
            "module has @skippable layers, which are for an nn.Sequential; let the forward pass the tensors"
        )


def _division(
    model: nn.Module, balance: Iterable[int] | None, devices: Iterable[Device] | None, names: str | Sequence[str] | None
) -> Division:
    given = [names] if isinstance(names, str) else names
    if balance is not None:
        blocks = divide(model, 1).blocks if given is None else named_blocks(model, given)
        return Division(blocks, checked_balance(balance, len(blocks)))
    most = sum(1 for _ in model.modules())
    return divide(model, len(checked_devices(devices, 1 if devices is None else most)), given)


_REGISTERED = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
