"""The :class:`Rank` of a model with a custom forward, which runs in each process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from microbatch import Versions, flatten

from .._batchnorm import DeferredBatchNorm
from ..engine._mini_batch import compute_outputs
from ..engine._workers import Workers
from ..model._division import divide_model
from ..model._far_run import number_pairs
from ..model._parts import build_parts, build_tree, empty_parts, find_common, find_others
from ..model._pick import picker
from ..model._pipeline import ModelPipeline
from ..model._stage import DividedModel, ModelStage
from ..model._stepping import ModelStepping, expect_own_forward
from ..module._devices import expect_same_device, identities_kept, untouched_on_failure
from ..module._frequencies import expect_sums
from ..module._keywords import NOTHING, Call, bind_arguments, get_mini_batch
from ..module._signature import class_for
from ..module._step import Asked, Prepared
from ..module._transforms import refuse_transforms
from ..schedule import Schedule
from ..skip import inspect_skip_layout
from ..values._leaves import as_value
from ..values._sharing import gather_outputs
from ._deferred_signals import allow_signals, defer_signals
from ._digests import Digests
from ._groups import Groups
from ._local_stages import LocalStages
from ._processes import RunProposal
from ._rank import Rank
from ._remote_loss import RemoteLoss


class ModelRank(ModelStepping, Rank, of_models=True):
    """The :class:`Rank` of a model other than an ``nn.Sequential``.

    The forward of the model runs on each rank, once per micro-batch. Blocks of other ranks return tensors on ``meta``.
    Values that are attributes of the model, such as ``rank.config``, are attributes of the rank. Methods of the model
    are not, since they would compute with all its blocks.
    """

    _common: dict[str, nn.Module]

    @defer_signals()
    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        with untouched_on_failure(module):
            super().__init__(module, *args, **kwargs)
        object.__setattr__(self, "__class__", class_for(type(self), ModelRank.forward, self._whole_model))

    def __getattr__(self, name: str) -> Any:
        """Return a parameter, buffer or layer of this rank, or a value that is an attribute of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            try:
                found = getattr(vars(self).get("_model"), name)
            except Exception:  # the attribute is missing, or computed from blocks of other ranks
                raise error from None
            if callable(found) or isinstance(found, Tensor):
                raise
            # Models read their device from their first parameter, which may be of another rank.
            return self._devices[0] if found == torch.device("meta") else found

    @defer_signals()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output in the pipeline, without gradients.

        Args:
            args, kwargs: the inputs of the model, the same on all ranks.

        Returns:
            The output of the model on the rank of the last stage, and None on the other ranks.

        Raises:
            TypeError, ValueError: the inputs are missing, differ between ranks, or cannot be split into micro-batches.
        """
        refuse_transforms()
        with self._opening("forward") as found, allow_signals():
            if not args and not kwargs:
                raise TypeError(_NEEDS_INPUTS)
            inputs = self._check_inputs(as_value(args, kwargs))
            batches, _ = self._cut(inputs)
            found.batches, found.whole = batches, self.out_spec is None
            found.must_match |= describe_inputs(inputs.bare)
            found.rows = Digests({"input": inputs.bare})

        def run() -> Any:
            spec = self._pipeline.spec(self._size(len(batches), trains=False), seed=found.seed)
            outputs = compute_outputs(self._pipeline, spec._replace(replays=found.whole), batches, Versions())
            self._keep_facts(found.whole)
            if not self._pipeline.ends:
                return None
            if self.out_spec is not None:
                return gather_outputs(outputs, batches, self.out_spec)
            return self._compute_output(self._get_pipeline(), outputs, batches, inputs.bare)

        with torch.no_grad():
            return self._pipeline.run_lock.run(run)

    def _apply(self, fn: Any, recurse: bool = True) -> ModelRank:
        expect_same_device(fn, (*self.parameters(), *self.buffers()))

        def convert(tensor: Tensor) -> Tensor:
            # Blocks of other ranks stay on meta, but have the same dtype, which the model may read from them.
            return fn(tensor) if not tensor.is_meta else tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype)

        with identities_kept(self._whole_model):
            self._whole_model._apply(convert, recurse)  # type: ignore[no-untyped-call]
        self._pin()
        return self

    def _divide(
        self,
        module: nn.Module,
        balance: Iterable[int] | None,
        blocks: str | Sequence[str] | None,
        stages: int,
        sample: Any,
    ) -> list[nn.Module]:
        expect_own_forward(module)
        expect_sums(module, self._chunks)
        if self._deferred:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self._chunks)
        self._division = divide_model(module, balance, blocks, lambda: stages, sample)
        self._balance, self._blocks = self._division.balance, self._division.blocks
        return [*build_parts(module, self._division)]

    def _share_by_all(self, every: Sequence[nn.Module]) -> None:
        # For example the tables of rotary embeddings. Each rank computes masks and positions from them.
        self._common = find_common(every, self._blocks)
        for stage in {rank: self._ranks.index(rank) for rank in self._ranks}.values():
            every[stage]._modules.update({**self._common, **every[stage]._modules})

    def _keep(self, module: nn.Module, share: LocalStages) -> None:
        self.__dict__.update(_model=module, _partitions=share.partitions)
        others = [part for j, part in enumerate(share.every) if j not in share.numbers]
        empty_parts(others, share.partitions)
        tree = build_tree(module, [*share.partitions])
        self.__dict__.update({name: vars(tree)[name] for name in ("_modules", "_parameters", "_buffers")})
        self._non_persistent_buffers_set = tree._non_persistent_buffers_set

    def _connect(self, share: LocalStages, groups: Groups, reports: Sequence[Mapping[str, Any]]) -> None:
        layout, count = inspect_skip_layout(share.every), len(self._balance)
        stages = [ModelStage(j, share.every[j], device, layout) for j, device in share.device_of.items()]
        processes = self._join(share, [*number_pairs(count).values()][count - 1 :], groups, reports)
        common, others = [*self._common.values()], find_others(share.every[:-1], {*self._blocks.values()})
        stages_of_others = {module: j for j, part in enumerate(others) for module in part.values()}
        named = {name: module for part in others for name, module in part.items()}
        divided = DividedModel(
            self._whole_model, self._division, picker(None), share.every, stages, common, named, stages_of_others
        )
        workers = Workers(share.devices)
        streams = self._copy_streams(share)
        self._pipeline = ModelPipeline(divided, layout, streams, workers, processes, offload=self._offload)

    def _creation_to_match(self, module: nn.Module, transport: str) -> dict[str, Any]:
        return {"blocks": [*self._blocks], **super()._creation_to_match(module, transport)}

    def _expect_layers(self) -> None:
        self._expect_blocks()

    @property
    def _places(self) -> list[torch.device]:
        return [self._devices[-1]] * len(self._balance)

    def _check_call(self, call: Call, schedule: Schedule | str | None, found: RunProposal) -> Asked:
        if get_mini_batch(call) is NOTHING:
            raise TypeError(_NEEDS_INPUTS)
        asked = self._cut_for_loss(Asked(call, schedule, bind_arguments(self._end(0), call), []))
        found.batches = asked.batches
        found.whole = self._is_whole(asked, self._size(len(found.batches), trains=call.trains))
        found.must_match |= describe_inputs(asked.inputs)
        return asked

    def _try_out(self, kind: Any, inputs: Any) -> None:
        """Test nothing before the first step, because this would take a run on all ranks."""

    def _readers(self) -> set[int]:
        return {*self._ranks}

    def _remote_loss(self, asked: Asked, *, whole: bool) -> RemoteLoss:
        return RemoteLoss(asked.kind, is_whole=whole, replays=whole and self.out_spec is None)

    def _build_result(self, prepared: Prepared, call: Call) -> Any:
        losses = prepared.losses
        self._keep_facts(losses.replays)
        if isinstance(losses, RemoteLoss) and losses.replays:
            conventions = self._get_pipeline().conventions
            if losses.kind not in conventions:
                conventions.keep(losses.kind, losses.finding())
        return super()._build_result(prepared, call)

    def _keep_facts(self, replays: Any) -> None:
        """Keep the facts from the forwards of a run, as all ranks do."""
        if replays:
            self._get_pipeline().take_facts()


def describe_inputs(inputs: Any) -> dict[str, Any]:
    """Return the properties of the inputs that must be equal on all ranks, each of which runs the model's forward."""
    leaves, tree = flatten(inputs)
    sizes = {
        f"the size of input tensor {k}": (tuple(leaf.shape), str(leaf.dtype))
        for k, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor)
    }
    return {"the structure of the inputs": repr(tree), **sizes}


_NEEDS_INPUTS = (
    "every rank needs the inputs, because the forward of the model runs on each of them; pass the same mini-batch on "
    "all ranks"
)
