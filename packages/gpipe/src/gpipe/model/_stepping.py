"""The part of a pipe of a model that is the same in one process and in several: inputs, losses, outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from microbatch import Batch, Versions, map_tensors, unwrap
from streams import add_note

from ..engine._loss_value import own_loss
from ..engine._losses import Losses
from ..engine._mini_batch import compute_outputs
from ..module._in_one_operation import in_one_operation
from ..module._inputs import Inputs
from ..module._keywords import Call
from ..module._rule import has_loss, is_left_open
from ..module._split_batch import Checked, are_cut_by_rows, check_batch
from ..module._step import Asked, Prepared, Stepping
from ..module._training import whole_arguments
from ..skip.layout import skippables
from ..values._leaves import Activation, get_tensors
from ..values._sharing import gather_outputs
from ._apart import unchanged
from ._blocks import Blocks, Division
from ._cache import expect_same_without_cache, without_cache
from ._convention import Convention
from ._count import with_whole_count
from ._documents import Packed, are_apart, cut_between, find_pieces, mean_of_row, share_a_row
from ._entries import with_entries
from ._pick import Pick
from ._pipeline import ModelPipeline
from ._replay import Replay, ReplayedLoss, depends_on_others, get_used_tensors, order_backward, return_itself
from ._rows import list_row_counts

Pipe = TypeVar("Pipe", bound="ModelStepping")


class ModelStepping(Stepping):
    """The part of a pipe of a model that computes losses."""

    _blocks: Blocks
    _division: Division
    _pick: Pick

    def train(self: Pipe, mode: bool = True) -> Pipe:
        """Set the mode of the model through its own ``train()``."""
        self._whole_model.train(mode)
        return self

    def _end(self, at: int) -> nn.Module:
        return self._whole_model

    def _layers(self) -> dict[str, nn.Module]:
        return dict(self._blocks)

    def _follow_model(self, inputs: Any, part: nn.Module | None = None) -> None:
        """Check before a run that the blocks are still in the model, and adopt its mode.

        Args:
            inputs: the arguments of ``part``, by default of the whole model.
        """
        self._expect_blocks()
        expect_same_without_cache(self._whole_model if part is None else part, Inputs.of(inputs))

    def _expect_blocks(self) -> None:
        model = self._whole_model
        modules = dict(model.named_modules())
        for name, block in self._blocks.items():
            if modules.get(name) is not block:
                raise RuntimeError(f"block {name!r} of {type(model).__name__} was replaced or removed{self._ANEW}")
        for part in self._partitions:
            part.training = model.training

    @property
    def _whole_model(self) -> nn.Module:
        model = self._model
        assert model is not None
        return model

    def _get_pipeline(self) -> ModelPipeline:
        assert isinstance(self._pipeline, ModelPipeline)
        return self._pipeline

    def _compute_module(self, pipeline: ModelPipeline, inputs: Any, out_spec: Any) -> Any:
        """Return the output, for the full mini-batch, of the module that ``pipeline`` computes."""
        return in_one_operation(self._output, pipeline, inputs, out_spec)

    def _output(self, pipeline: ModelPipeline, inputs: Any, out_spec: Any) -> Any:
        given = self._check_inputs(inputs)
        batches, versions = self._cut(given, pipeline.divided.model)
        self._warn_of_batch(len(batches))

        def run() -> Any:
            spec = pipeline.spec(self._size(len(batches), trains=torch.is_grad_enabled()))
            outputs = compute_outputs(pipeline, spec._replace(replays=out_spec is None), batches, versions)
            if out_spec is not None:
                return gather_outputs(outputs, batches, out_spec)
            return self._compute_output(pipeline, outputs, batches, given.bare)

        return pipeline.run_lock.run(run)

    def _compute_output(
        self, pipeline: ModelPipeline, outputs: Sequence[Activation], batches: Sequence[Batch], inputs: Any
    ) -> Any:
        """Return the output of a module for the full mini-batch, from the outputs of a run."""
        used = get_used_tensors(outputs).value
        with pipeline.divided.answering(), without_cache(self._whole_model):
            return order_backward(self._replay(pipeline, used, batches, inputs), {*self._devices})

    @property
    def _places(self) -> list[torch.device]:
        """The device of each stage, in all processes."""
        return self._devices

    def _replay(
        self,
        pipeline: ModelPipeline,
        used: Any,
        batches: Sequence[Batch],
        inputs: Any,
        get_owner: Callable[[Tensor], Tensor] = return_itself,
        pick: Callable[[Any], Any] = return_itself,
    ) -> Any:
        """Return the output of a module for the full mini-batch, computed from the outputs of blocks that it uses."""
        try:
            facts, counts = pipeline.take_facts(), list_row_counts(batches, inputs)
            model, others = pipeline.divided.model, pipeline.divided.stages_of_others
            replay = Replay(
                model,
                self._blocks.values(),
                others,
                facts,
                used,
                counts,
                pipeline.elsewhere,
                self._places,
                get_owner,
                offload=self._offload,
            )
            return replay.output(inputs, lambda output: pick(pipeline.divided.pick(output)))
        except BaseException:
            pipeline.forget()
            raise

    def _cut(self, inputs: Checked, part: nn.Module | None = None) -> tuple[list[Batch], Versions]:
        pieces = find_pieces(self.in_spec, inputs.bare, self._chunks)
        try:
            return super()._cut(inputs if pieces is None else cut_between(pieces, inputs), part)
        except ValueError as error:
            if self.in_spec is None and share_a_row(inputs.bare):
                add_note(error, "its only row has several documents, between which in_spec=gpipe.Packed() cuts it")
            raise

    @property
    def _cuts_by_name(self) -> bool:
        return super()._cuts_by_name or isinstance(self.in_spec, Packed)

    def _cut_for_loss(self, asked: Asked) -> Asked:
        if asked.call.reduction == "mean" and find_pieces(self.in_spec, unwrap(asked.inputs)[0], self._chunks):
            raise mean_of_row()
        conventions, kind = self._get_pipeline().conventions, self._kind_of_loss(asked)
        if not (kind in conventions or is_left_open(asked.schedule) or asked.schedule == "fill_drain"):
            self._try_out(kind, asked.inputs)
        convention = conventions[kind]
        batches, _ = self._cut(self._check_inputs(asked.inputs, convention))
        return asked._replace(batches=batches, kind=kind, adds=convention is not None)

    def _check_inputs(self, inputs: Any, convention: Convention | None = None) -> Checked:
        """Check that ``inputs`` can be split. Each micro-batch receives the number of items of the full mini-batch."""
        if self._cuts_by_name:
            named = self.in_spec if isinstance(self.in_spec, Mapping) else ()
            inputs = with_entries(with_whole_count(inputs, convention), named)
        return check_batch(inputs, None if isinstance(self.in_spec, Packed) else self.in_spec)

    def _kind_of_loss(self, asked: Asked) -> Any:
        """Return the kind of the loss that the model computes; None if its losses of micro-batches do not add up."""
        call = asked.call
        is_own = call.loss_fn is None and call.reduction is None and not call.return_outputs
        if not is_own or self.out_spec is not None or not self._cuts_by_name or has_loss(asked.schedule):
            return None
        bare, spec = unwrap(asked.inputs)
        pieces = find_pieces(self.in_spec, bare, self._chunks)
        if pieces is not None and not are_apart(pieces, Inputs.of(bare).kwargs.get("labels")):
            return None
        if (spec is not None or self.in_spec is not None) and not are_cut_by_rows(self._check_inputs(asked.inputs)):
            return None
        return self._get_pipeline().conventions.find_kind(bare)

    def _try_out(self, kind: Any, inputs: Any) -> None:
        """Test before the first step how the model computes a loss, using a forward of the first micro-batch."""
        pipeline = self._get_pipeline()
        with torch.no_grad(), unchanged(self._whole_model, self._devices):
            batches, versions = self._cut(self._check_inputs(inputs))
            spec = pipeline.spec(self._size(1, trains=False))
            compute_outputs(pipeline, spec._replace(replays=True), batches[:1], versions)
        pipeline.conventions.learn(kind, pipeline.take_facts(), batches[0])

    def _computes_loss(self, asked: Asked) -> str | None:
        return type(self._whole_model).__name__ if asked.call.loss_fn is None else None

    def _losses(self, asked: Asked, scope: ExitStack, *, whole: bool) -> Losses:
        if not whole or self.out_spec is not None:
            return super()._losses(asked, scope, whole=whole)
        call, batches = asked.call, asked.batches
        picks = call.loss_fn is None and not call.return_outputs
        loss_fn = return_itself if picks else call.loss_fn or own_loss
        pick = own_loss if picks else return_itself
        arguments = whole_arguments(call, self._devices[-1])
        if asked.kind in self._get_pipeline().conventions:
            self._warn_of_whole(asked)
        inputs = self._check_inputs(asked.inputs).bare
        kept: dict[int, Activation] = {}

        def loss(used: Any, inputs: Any, get_owner: Callable[[Tensor], Tensor], *others: Any) -> Any:
            output = self._replay(self._get_pipeline(), used, batches, inputs, get_owner, pick)
            if call.return_outputs:  # a copy, because loss_fn may modify it
                kept[0] = Activation(map_tensors(lambda tensor: tensor.detach().clone(), output))
            try:
                found = loss_fn(output, *others)
            except (RuntimeError, NotImplementedError) as error:
                if _lacks_data(output):
                    raise depends_on_others(self._whole_model) from error
                raise
            if _lacks_data(found):
                raise depends_on_others(self._whole_model)
            return found

        unlike = None if call.reduction is None else self._unlike(asked)
        weight = 1.0 / call.divisor
        learn = partial(self._learn_convention, asked)
        losses = ReplayedLoss(loss, inputs, arguments, get_used_tensors, weight=weight, unlike=unlike, learn=learn)
        losses.outputs = kept
        return losses

    def _build_result(self, prepared: Prepared, call: Call) -> Any:
        losses = prepared.losses
        losses.finding()
        if not (call.return_outputs and isinstance(losses, ReplayedLoss)):
            return super()._build_result(prepared, call)
        found = super()._build_result(prepared, call._replace(return_outputs=False))
        return *(found if isinstance(found, tuple) else (found,)), losses.outputs[0].value

    def _learn_convention(self, asked: Asked) -> Convention | None:
        """Test after the first step of a kind how the model computes its loss, for later steps."""
        pipeline = self._get_pipeline()
        if asked.kind not in pipeline.conventions:
            pipeline.conventions.learn(asked.kind, pipeline.take_facts(), asked.batches[0])
            if pipeline.conventions[asked.kind] is None:
                self._warn_of_whole(asked)
        return pipeline.conventions[asked.kind]


def _lacks_data(value: Any) -> bool:
    """Return whether a tensor in ``value`` is on ``meta``, because it depends on parameters of another process."""
    return any(tensor.is_meta for tensor in get_tensors(value))


def expect_own_forward(module: nn.Module) -> None:
    """Raise TypeError unless the forward of ``module`` is Python code that calls modules."""
    if isinstance(module, Stepping):
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
