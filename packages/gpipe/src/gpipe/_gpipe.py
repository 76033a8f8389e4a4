""":class:`GPipe`, the module that wraps a model."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ._batchnorm import DeferredBatchNorm
from ._chooser import Chooser
from ._torch import device_in
from .engine._mini_batch import compute_outputs, train
from .engine._pipeline import Pipeline
from .engine._workers import Workers
from .module._arguments import Device, check_devices, check_flag, check_offload, check_places
from .module._data import has_data
from .module._devices import (
    device_map,
    expect_same_device,
    identities_kept,
    moving_denied,
    replicating_denied,
    untouched_on_failure,
)
from .module._frequencies import expect_sums
from .module._in_one_operation import in_one_operation
from .module._init import get_initializer, take_off_hooks
from .module._modes import Modes, check_modes, expect_fitting, laid_out
from .module._names import Flattened
from .module._partition import BalanceError, check_balance, divide, expect_sequential, recommend_auto_balance
from .module._rule import SeenSums, choose_schedule_name
from .module._signature import class_for
from .module._split_batch import check_batch
from .module._step import Prepared, Stepping
from .module._transforms import not_compiled, refuse_transforms
from .schedule import Choice, Schedule
from .skip import verify_skippables
from .transport._copy import CopyStreams
from .values._leaves import Activation, as_value


class GPipe(Stepping):
    """A drop-in replacement for a model, which runs it as a pipeline of stages.

    The layers are split into partitions, one per device, and each mini-batch into micro-batches. Outputs and gradients
    match the model's on the full mini-batch, except for layers that use statistics of the batch, such as batch norm.

    Args:
        module: the model: an ``nn.Sequential``, or a model with a custom forward. A custom forward runs once per
            micro-batch, and is split at the elements of its lists of modules. The modules are moved to the devices, not
            copied. Parameters that partitions share are on the device of the first of them.
        balance: the number of layers, or blocks, of each partition. It is optional with a ``sample``: then, after a
            warm-up run, forward and backward are timed on a copy for about a second, at least once. For a model with a
            custom forward it is always optional: without a ``sample``, and on ``meta``, blocks are balanced by the
            bytes of their parameters.
        sample: an input of the model, with as many rows as a micro-batch, to measure the balance: a mapping for named
            arguments, a tuple for positional ones, :class:`microbatch.Arguments` for both, or one tensor.
        devices: one device per partition. Devices may repeat, and surplus devices are ignored. By default all CUDA
            devices, or the CPU for every partition if there are none.
        chunks: the number of micro-batches per mini-batch. As in ``torch.chunk``, a small mini-batch may yield fewer.
        checkpoint: which micro-batches save only their inputs, and are recomputed in the backward: ``"always"`` all,
            ``"except_last"`` all but the last, ``"never"`` none. With ``"offload"`` nothing is recomputed: what a
            micro-batch saves goes to the host after its forward, and returns before its backward. Or a list with one of
            these per partition. Nothing is checkpointed in evaluation.
        deferred_batch_norm: whether batch norm updates its running statistics once per mini-batch
            (:class:`DeferredBatchNorm`).
        in_spec: how the input is split, if it has its rows in a dimension other than 0, or not one row per sample:
            :class:`microbatch.Split`, :class:`microbatch.Replicate`, or a tree of them that is a prefix of the input. A
            mapping names keywords; keywords may be missing in the mapping, or in a call. :class:`gpipe.Packed` is for a
            model's row of several documents.
        out_spec: how the outputs of micro-batches are joined: the same classes and, for outputs with one value per
            micro-batch, such as a loss, :class:`microbatch.Mean` (weighted by rows) or :class:`microbatch.Sum`.
        init: for a model on ``meta``, the source of its data, which is loaded layer by layer onto the device of each
            partition. ``"reset"`` calls the modules' ``reset_parameters()``. A function is called with each module, as
            in ``nn.Module.apply``. A state dict has the model's names, and may load values lazily. A path leads to a
            file of ``torch.save``, a ``.safetensors`` file or a Hugging Face folder, as ``snapshot_download()``
            returns.
        blocks: the names of modules, or of lists of modules, that a model with a custom forward is split at.
        pick: the part of a custom forward's output that the pipe returns and ``loss_fn`` receives: the name of a
            field, or a function of the output. By default the full output.
        offload: whether parameters stay on the host, in pinned memory. A stage is loaded onto its device before it
            computes, while another one computes, and unloaded afterwards; a device holds two stages at a time. The
            gradients arrive in ``.grad`` on the host, where any optimizer updates the parameters. A device may have any
            number of stages, as in ``devices=[0] * 8``. Buffers stay on the devices. A dtype, such as
            ``torch.bfloat16``, is that in which stages compute with floating-point parameters; parameters on the host
            and their ``.grad`` keep their own dtype.

    Attributes:
        balance: the number of layers of each partition, a list of int.
        devices: the device of each partition, a list of ``torch.device``.
        chunks: the number of micro-batches per mini-batch, an int.
        checkpoint: the argument of the same name.
        partitions: an ``nn.ModuleList`` of ``nn.Sequential``: the same layers under the same names, by partition.

    Raises:
        TypeError: ``module`` is an ``nn.Sequential`` that does more than run its layers in order, or has no forward
            that can be split; an argument has a wrong type.
        BalanceError: a ValueError: ``balance`` is missing or does not fit.
        ValueError: ``chunks`` or ``checkpoint`` is invalid or incompatible with a layer, a layer occurs twice,
            partitions share modules that cannot be copied, a device is missing or cannot hold its partition, or
            ``init`` does not fit the model, or does not set all of its tensors.
        IndexError: there are fewer devices than partitions.

    If an error is raised, no layer has moved, but tensors that had data keep the values that ``init`` wrote.

    Source: GPipe (arXiv 1811.06965); torchgpipe (arXiv 2004.09910).

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> pipe = GPipe(model, balance=[2, 1], devices=["cpu", "cpu"], chunks=4)
    >>> pipe(torch.zeros(8, 4)).shape
    torch.Size([8, 2])
    """

    _chooser: Chooser
    _copy_streams: list[CopyStreams]
    _workers: Workers

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
        offload: bool | torch.dtype = False,
    ) -> None:
        super().__init__()
        # Arguments that can be checked alone come first, because measuring takes a second.
        initializer = get_initializer(init)
        self.in_spec = in_spec
        self.out_spec = out_spec
        self.chunks = chunks
        modes = check_modes(checkpoint)
        deferred = check_flag("deferred_batch_norm", deferred_batch_norm)
        self.__dict__["_offload"] = check_offload(offload)
        if blocks is not None or pick is not None:
            raise TypeError("blocks= and pick= are for a model with a custom forward; omit them")
        with untouched_on_failure(module) if isinstance(module, nn.Module) else nullcontext():
            kept = take_off_hooks(module)
            expect_sequential(module)
            assert isinstance(module, nn.Sequential)
            if balance is None:
                balance = _compute_balance(module, devices, sample)
            sizes = check_balance(balance, len(module))
            places = check_places(devices, len(sizes))
            verify_skippables(module)
            expect_sums(module, self.chunks)
            # Bypasses nn.Module.__setattr__, here and below, because a layer of the model may have any of these names.
            self.__dict__.update(_checkpoint=expect_fitting(modes, len(sizes)), _balance=sizes, _devices=places)
            norm_chunks = self.chunks if deferred else 0
            partitions = divide(module, sizes, places, initializer or kept, norm_chunks, offload=bool(self._offload))
        self.training = module.training
        has_deferred = deferred or any(isinstance(each, DeferredBatchNorm) for each in module.modules())
        self.__dict__["_least_rows"] = 2 if has_deferred else 1
        self._take(partitions, module)
        if self._model is not None:
            # The pipe calls the model's state_dict() and load_state_dict(), and shares its hooks, even later ones.
            self.__dict__.update({name: each for name, each in vars(self._model).items() if "state_dict" in name})
        self._prepare()

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition."""
        return list(self._devices)

    @property
    def checkpoint(self) -> Modes:
        """The checkpoint mode, or a list with one mode per partition. Can be set; later runs use the new value."""
        return copy.copy(self._checkpoint)

    @checkpoint.setter
    def checkpoint(self, mode: str | Sequence[str]) -> None:
        modes = expect_fitting(check_modes(mode), len(self._balance))
        self._workers.run_lock.run(lambda: self.__dict__.update(_checkpoint=modes))

    @property
    def last_schedule(self) -> Choice | None:
        """The schedule of the last :meth:`step`; None before the first step.

        Holds its name, the stages whose backward was split, the times that ``"auto"`` and ``"search"`` predicted for
        each schedule, and the schedule that ``"search"`` has found.
        """
        return self._chooser.last

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the wrapped module in a pipeline.

        Args:
            args, kwargs: the arguments of the first layer: tensors, or trees of tensors, whose rows can be split into
                the same number of micro-batches. They are moved to the first device. An argument inside
                ``Replicate(...)``, or replicated by ``in_spec``, is passed to every micro-batch without being split.

        Returns:
            The output of the wrapped module for the full mini-batch, on the last device.

        Raises:
            TypeError, ValueError: an input cannot be split into micro-batches, or the outputs cannot be concatenated.
        """
        refuse_transforms()
        return in_one_operation(self._forward, as_value(args, kwargs))

    def _forward(self, value: Any) -> Any:
        inputs = check_batch(value, self.in_spec)
        if not self._devices:
            return inputs.bare
        batches, versions = self._cut(inputs)
        self._warn_of_batch(len(batches))

        def run() -> Sequence[Activation]:
            spec = self._pipeline.spec(self._size(len(batches), trains=torch.is_grad_enabled()))
            return compute_outputs(self._pipeline, spec, batches, versions)

        return self._gather(self._pipeline.run_lock.run(run), batches)

    def close(self) -> None:
        """Stop the worker threads, which otherwise stop when the pipe is freed. The next use starts new ones.

        Waits until a run on another thread has finished.
        """
        self._workers.run_lock.run(self._workers.close)

    def __len__(self) -> int:
        return len(self._layers())

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._whole())

    def __getitem__(self, index: int | slice) -> nn.Module:
        return self._whole()[index]

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        raise TypeError(f"layer {index} of a pipe cannot be replaced{self._ANEW}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("balance", "devices", "partitions"):
            raise AttributeError(f"{name} of a pipe cannot be set{self._ANEW}")
        if name in self.__dict__ or hasattr(type(self), name) or not self._is_of_model(name):
            super().__setattr__(name, value)
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or not self._is_of_model(name):
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that the pipe lacks, such as ``config``, on the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not self._is_of_model(name):
                raise
            return getattr(self._model, name)

    def _is_of_model(self, name: str) -> bool:
        """Return whether the model has an attribute ``name``, which Python does not look up by itself.

        Libraries also read private attributes of an instance of their class, which a pipe claims to be.
        """
        return not name.startswith("__") and hasattr(vars(self).get("_model"), name)

    def _get_name(self) -> str:
        # Hugging Face's Trainer decides by the name of a model's class whether to shift labels.
        return type(self if self._model is None else self._model).__name__

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Change the dtype of parameters and buffers. Moving a pipe to a device raises TypeError.

        Args:
            args, kwargs: the arguments of ``torch.nn.Module.to``, without a device.

        Returns:
            The pipe.

        Raises:
            TypeError: a device is given.
        """
        if device_in(*args, **kwargs) is not None:
            raise moving_denied("to()")
        return super().to(*args, **kwargs)

    def cuda(self, device: Device | None = None) -> GPipe:
        raise moving_denied("cuda()")

    def cpu(self) -> GPipe:
        raise moving_denied("cpu()")

    def to_empty(self, *, device: Any, recurse: bool = True) -> GPipe:
        raise moving_denied("to_empty()")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GPipe:
        """Apply ``fn`` to all tensors, for a module around the pipe that is moved or cast; only a cast is allowed."""
        # Checked before the first tensor changes: a later error would leave some tensors moved.
        expect_same_device(fn, (*self.parameters(), *self.buffers()))
        held = self._partitions if self._model is None else self._model
        with identities_kept(held):
            held._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._pin()
        return self

    def extra_repr(self) -> str:
        return f"balance={self._balance}, chunks={self._chunks}, checkpoint={self._checkpoint!r}"

    def __repr__(self) -> str:
        blocks = (
            f"  ({j}) on {device}: {indent(repr(partition))}"
            for j, (device, partition) in enumerate(zip(self._devices, self._partitions, strict=True))
        )
        return "\n".join([f"GPipe({self.extra_repr()}", *blocks, ")"])

    @property
    def hf_device_map(self) -> dict[str, str | torch.device]:
        """The device of each layer and parameter, which keeps accelerate and transformers from moving the model."""
        held = zip(self._partitions, self._devices, strict=True)
        layers = {name: device for partition, device in held for name in partition._modules if name in self._modules}
        return device_map(layers, self.named_parameters())

    def _replicate_for_data_parallel(self) -> GPipe:
        raise replicating_denied()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without threads and streams, which belong to this process."""
        return {key: value for key, value in self.__dict__.items() if key not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict, with the names of the wrapped module.

        Args:
            args, kwargs: the arguments of the wrapped module's ``state_dict``.

        Returns:
            The result of that method: usually the tensors by name.
        """
        # While a run has loaded a stage, its modules hold copies.
        state_dict = super().state_dict if self._model is None else self._model.state_dict
        if not self._offload:
            return state_dict(*args, **kwargs)
        return self._workers.run_lock.run(lambda: state_dict(*args, **kwargs))

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict with the names of the wrapped module.

        Args:
            args, kwargs: the arguments of the wrapped module's ``load_state_dict``.

        Returns:
            The result of that method: usually the missing and the unexpected keys.
        """
        if self._model is None:
            return super().load_state_dict(*args, **kwargs)
        return self._model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load tensors, and accept torchgpipe's keys: ``partitions.j.name`` means ``name``."""
        if self._model is not None:  # the pipe is a submodule, so this is called instead of load_state_dict()
            self._model._load_from_state_dict(state_dict, prefix, *args)
            return
        own = {prefix + name for name in self.state_dict()}
        for key in [key for key in state_dict if key not in own]:
            name = _PARTITION_KEY.sub("", key[len(prefix) :])
            if key.startswith(prefix) and prefix + name in own:
                state_dict[prefix + name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _train(self, prepared: Prepared, schedule: Schedule | str | None) -> None:
        batches, size, losses, _, updates = prepared
        if not isinstance(schedule, Schedule):
            schedule = choose_schedule_name(schedule, whole=losses.is_whole, offloads=bool(self._offload))
        chosen, recorder = self._chooser.plan(schedule, batches, size)
        spec = self._pipeline.spec(size, chosen, losses, observer=recorder)
        train(self._pipeline, spec._replace(updates=updates), batches)
        self._chooser.learn()

    def _prepare(self) -> None:
        self.__dict__["_copy_streams"] = [CopyStreams.on(device) for device in self._devices]
        self.__dict__["_workers"] = Workers(self._devices)
        self.__dict__["_sums"] = SeenSums()
        stages, layout = laid_out(self._partitions, self._devices)
        self.__dict__["_pipeline"] = Pipeline(stages, layout, self._copy_streams, self._workers, offload=self._offload)
        self.__dict__["_chooser"] = Chooser(stages)
        self.__dict__["_laid_out"] = self._list_layers()
        first = self._end(0) if self._balance else None
        # One class per signature, because frameworks read argument names from type(model).forward.
        object.__setattr__(self, "__class__", class_for(type(self), GPipe.forward, first))

    def _whole(self) -> nn.Sequential:
        layers = OrderedDict(self._layers())
        return nn.Sequential(layers) if self._model is None else Flattened(layers).of(self._model)


def _compute_balance(module: nn.Sequential, devices: Iterable[Device] | None, sample: Any) -> list[int]:
    if sample is None:
        raise BalanceError(recommend_auto_balance("balance is required: how many layers each partition gets"))
    from .balance import balance_by_parameters, balance_by_time  # imports the profiler, which most pipes do not need

    partitions = max(1, min(len(check_devices(devices, 1 if devices is None else len(module))), len(module)))
    if has_data(module):
        return balance_by_time(partitions, module, sample)
    return balance_by_parameters(partitions, module)


_OF_THIS_PROCESS = ("_pipeline", "_chooser", "_copy_streams", "_workers", "_laid_out", "_sums", "_past", "_pipelines")
_PARTITION_KEY = re.compile(r"^partitions\.\d+\.")


def indent(text: str) -> str:
    return text.replace("\n", "\n  ")
