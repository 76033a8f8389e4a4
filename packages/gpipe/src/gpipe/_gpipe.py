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
from .module._arguments import Device, checked_devices, checked_flag, checked_places
from .module._cut import checked
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
from .module._init import initializer_of, take_off_hooks
from .module._modes import Modes, checked_modes, expect_fitting, laid_out
from .module._names import Flattened
from .module._partition import BalanceError, checked_balance, divide, expect_sequential, recommend_auto_balance
from .module._rule import SeenSums, named_for
from .module._signature import class_for
from .module._step import Prepared, Stepping
from .module._transforms import not_compiled, refuse_transforms
from .schedule import Choice, Schedule
from .skip import verify_skippables
from .transport._copy import CopyStreams
from .values._leaves import as_value


class GPipe(Stepping):
    """A sequential model that computes in a pipeline: a drop-in replacement for the model itself.

    The layers are cut into partitions, one on each device, and every mini-batch into micro-batches. Outputs and
    gradients equal those of the model on the whole mini-batch, except for layers that look at the batch as a whole,
    such as batch norm.

    Args:
        module: the model: an ``nn.Sequential``, or a model with a forward of its own. That runs once per micro-batch,
            and is cut at the elements of its lists of modules. Its modules are moved to the devices, not copied.
            Parameters that partitions share are on the device of the first one.
        balance: the number of layers, or blocks, of each partition. With a ``sample`` it is optional: after a run to
            warm up, forward and backward are measured on a copy for about a second, at least once. Of a model with a
            forward of its own it is optional also without: then blocks are balanced by the bytes of their parameters,
            as they are on ``meta``.
        sample: an input of the model, with as many rows as a micro-batch, to measure the balance: a mapping for named
            arguments, a tuple for positional ones, :class:`microbatch.Arguments` for both, or one tensor.
        devices: one for each partition; may repeat, and surplus devices are ignored. By default all CUDA devices, or
            the CPU for each partition if there are none.
        chunks: the number of micro-batches of a mini-batch. As with ``torch.chunk``, a small mini-batch gives fewer.
        checkpoint: which micro-batches keep only their inputs between forward and backward and compute the rest again:
            ``"always"`` all, ``"except_last"`` all but the last, ``"never"`` none; or a list with one of these for each
            partition. Nothing is checkpointed in evaluation.
        deferred_batch_norm: whether batch norm updates its running statistics once per mini-batch
            (:class:`DeferredBatchNorm`).
        in_spec: how the input is cut, if its rows are not on dimension 0, or not one for each sample:
            :class:`microbatch.Split`, :class:`microbatch.Replicate`, or a tree of them that is a prefix of the input. A
            mapping names keywords; it may leave out some, and a call may leave out others. :class:`gpipe.Packed` is for
            a model's row of several documents.
        out_spec: how the outputs of micro-batches are joined: the same classes and, for outputs with one value for each
            micro-batch, such as a loss, :class:`microbatch.Mean` (weighted by rows) or :class:`microbatch.Sum`.
        init: for a model on ``meta``: the source of its data, which is loaded layer by layer onto each partition's own
            device. ``"reset"`` calls the modules' own ``reset_parameters()``; a function is called with each module, as
            by ``nn.Module.apply``; a state dict has the model's names, and may load values lazily; a path is a file of
            ``torch.save``, a ``.safetensors`` file or a folder of Hugging Face, as ``snapshot_download()`` returns one.
        blocks: the names of lists of modules, or of modules, at which a model is cut.
        pick: what the pipe returns of the output of a model with a forward of its own, and what a ``loss_fn`` gets: the
            name of a field, or a function of the output. By default all.

    Attributes:
        balance: the number of layers of each partition, a list of int.
        devices: the device of each partition, a list of ``torch.device``.
        chunks: the number of micro-batches of a mini-batch, an int.
        checkpoint: as it was given.
        partitions: an ``nn.ModuleList`` of ``nn.Sequential``: the same layers under the same names, by partition.

    Raises:
        TypeError: ``module`` is an ``nn.Sequential`` that does more than compute its layers in order, or has no
            forward that can be cut; an argument has a wrong type.
        BalanceError: a ValueError; ``balance`` is missing or does not fit.
        ValueError: ``chunks`` or ``checkpoint`` is invalid or does not go with a layer, a layer occurs twice,
            partitions share modules that cannot be copied, a device is missing or cannot hold its partition, or
            ``init`` does not fit the model, or does not set all of its tensors.
        IndexError: there are fewer devices than partitions.

    On any error no layer has moved; values that ``init`` has given to tensors with data remain.

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
    ) -> None:
        super().__init__()
        # First whatever can be checked by itself: measuring takes a second.
        initializer = initializer_of(init)
        self.in_spec = in_spec
        self.out_spec = out_spec
        self.chunks = chunks
        modes = checked_modes(checkpoint)
        deferred = checked_flag("deferred_batch_norm", deferred_batch_norm)
        if blocks is not None or pick is not None:
            raise TypeError("blocks= and pick= are for a model with a forward of its own; leave them out")
        with untouched_on_failure(module) if isinstance(module, nn.Module) else nullcontext():
            kept = take_off_hooks(module)
            expect_sequential(module)
            assert isinstance(module, nn.Sequential)
            if balance is None:
                balance = _measured_balance(module, devices, sample)
            sizes = checked_balance(balance, len(module))
            places = checked_places(devices, len(sizes))
            verify_skippables(module)
            expect_sums(module, self.chunks)
            # Past nn.Module.__setattr__, here and below: a layer of the model may have any of these names.
            self.__dict__.update(_checkpoint=expect_fitting(modes, len(sizes)), _balance=sizes, _devices=places)
            partitions = divide(module, sizes, places, initializer or kept, self.chunks if deferred else 0)
        self.training = module.training
        has_deferred = deferred or any(isinstance(each, DeferredBatchNorm) for each in module.modules())
        self.__dict__["_least_rows"] = 2 if has_deferred else 1
        self._take(partitions, module)
        if self._model is not None:
            # Its state_dict() and load_state_dict() are called; its hooks are those of the pipe, also later ones.
            self.__dict__.update({name: each for name, each in vars(self._model).items() if "state_dict" in name})
        self._prepare()

    @property
    def devices(self) -> list[torch.device]:
        """The device of each partition."""
        return list(self._devices)

    @property
    def checkpoint(self) -> Modes:
        """Which micro-batches are checkpointed, as the argument says. May be set; later runs use the new value."""
        return copy.copy(self._checkpoint)

    @checkpoint.setter
    def checkpoint(self, mode: str | Sequence[str]) -> None:
        modes = expect_fitting(checked_modes(mode), len(self._balance))
        with self._workers.section.entered():
            self.__dict__["_checkpoint"] = modes

    @property
    def last_schedule(self) -> Choice | None:
        """The schedule of the last :meth:`step`; None before the first step.

        It has its name, the stages whose backward was split, and the seconds that ``"auto"`` expected of each schedule.
        """
        return self._chooser.last

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the wrapped module in a pipeline.

        Args:
            args, kwargs: the arguments of the first layer: tensors, or trees of tensors, whose rows can be cut into
                equally many micro-batches. They are moved to the first device. With ``Replicate(...)`` around an
                argument, or by ``in_spec``, every micro-batch gets it as a whole.

        Returns:
            The output of the wrapped module for the whole mini-batch, on the last device.

        Raises:
            TypeError, ValueError: an input cannot be cut into micro-batches, or the outputs cannot be concatenated.
        """
        refuse_transforms()
        inputs = checked(as_value(args, kwargs), self.in_spec)
        if not self._devices:
            return inputs.bare
        batches, versions = self._cut(inputs)
        self._warn_of_one(len(batches))
        with self._pipeline.section.entered():
            spec = self._pipeline.spec(self._size(len(batches), trains=torch.is_grad_enabled()))
            outputs = compute_outputs(self._pipeline, spec, batches, versions)
        return self._gathered(outputs, batches)

    def close(self) -> None:
        """End the threads of this pipe; without this call, they end when it is freed. The next use starts new ones.

        Waits for a run of another thread to end.
        """
        with self._workers.section.entered():
            self._workers.close()

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

    def __getattr__(self, name: str) -> Any:
        """What a pipe does not have, such as ``config``, the model answers, and takes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not self._is_of_model(name):
                raise
            return getattr(self._model, name)

    def _is_of_model(self, name: str) -> bool:
        """Whether this is an attribute of the model, and not a private one."""
        is_private = name.startswith("_") and name not in _PRIVATE_OF_MODELS
        return not is_private and hasattr(vars(self).get("_model"), name)

    def _get_name(self) -> str:
        # Hugging Face's Trainer knows by the name of a model whether it shifts labels.
        return type(self if self._model is None else self._model).__name__

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Change the dtype of parameters and buffers, as any module does; moves to a device are refused.

        Args:
            args, kwargs: as of ``torch.nn.Module.to``, without a device.

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
        """Called when a module around the pipe is moved or changes its dtype. Only a change of dtype is allowed."""
        # Before the first tensor is changed: an error in the middle would leave half of them moved.
        expect_same_device(fn, (*self.parameters(), *self.buffers()))
        held = self._partitions if self._model is None else self._model
        with identities_kept(held):
            held._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        return f"balance={self._balance}, chunks={self._chunks}, checkpoint={self._checkpoint!r}"

    def __repr__(self) -> str:
        blocks = (
            f"  ({j}) on {device}: {indented(repr(partition))}"
            for j, (device, partition) in enumerate(zip(self._devices, self._partitions, strict=True))
        )
        return "\n".join([f"GPipe({self.extra_repr()}", *blocks, ")"])

    @property
    def hf_device_map(self) -> dict[str, str | torch.device]:
        """The device of each layer and parameter, so that accelerate and transformers do not move the model."""
        held = zip(self._partitions, self._devices, strict=True)
        layers = {name: device for partition, device in held for name in partition._modules if name in self._modules}
        return device_map(layers, self.named_parameters())

    def _replicate_for_data_parallel(self) -> GPipe:
        raise replicating_denied()

    def __getstate__(self) -> dict[str, Any]:
        """All but the threads and streams, which belong to this process."""
        return {key: value for key, value in self.__dict__.items() if key not in _OF_THIS_PROCESS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module, under the names of the wrapped one.

        Args:
            args, kwargs: those of ``nn.Module.state_dict``, or of the model's own method, which is called.

        Returns:
            The tensors by name, or what that method returns.
        """
        return super().state_dict(*args, **kwargs) if self._model is None else self._model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module.

        Args:
            args, kwargs: those of ``nn.Module.load_state_dict``, or of the model's own method, which is called.

        Returns:
            What is missing and what is left over, or what that method returns.
        """
        if self._model is None:
            return super().load_state_dict(*args, **kwargs)
        return self._model.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Take keys as torchgpipe writes them too: ``partitions.j.name`` is ``name``."""
        if self._model is not None:  # the pipe is a part of another module
            self._model._load_from_state_dict(state_dict, prefix, *args)
            return
        own = {prefix + name for name in self.state_dict()}
        for key in [key for key in state_dict if key not in own]:
            name = _PARTITION_KEY.sub("", key[len(prefix) :])
            if key.startswith(prefix) and prefix + name in own:
                state_dict[prefix + name] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _train(self, prepared: Prepared, schedule: Schedule | str | None) -> None:
        batches, size, losses, _ = prepared
        if not isinstance(schedule, Schedule):
            schedule = named_for(schedule, whole=losses.is_whole)
        chosen, recorder = self._chooser.plan(schedule, batches, size)
        train(self._pipeline, self._pipeline.spec(size, chosen, losses, observer=recorder), batches)
        self._chooser.learn()

    def _prepare(self) -> None:
        self.__dict__["_copy_streams"] = [CopyStreams.on(device) for device in self._devices]
        self.__dict__["_workers"] = Workers(self._devices)
        self.__dict__["_sums"] = SeenSums()
        stages, layout = laid_out(self._partitions, self._devices)
        self.__dict__["_pipeline"] = Pipeline(stages, layout, self._copy_streams, self._workers)
        self.__dict__["_chooser"] = Chooser(stages)
        self.__dict__["_laid_out"] = self._held()
        first = self._end(0) if self._balance else None
        # A class of its own for each signature: frameworks ask type(model).forward for the names of arguments.
        object.__setattr__(self, "__class__", class_for(type(self), GPipe.forward, first))

    def _whole(self) -> nn.Sequential:
        layers = OrderedDict(self._layers())
        return nn.Sequential(layers) if self._model is None else Flattened(layers).of(self._model)


def _measured_balance(module: nn.Sequential, devices: Iterable[Device] | None, sample: Any) -> list[int]:
    if sample is None:
        raise BalanceError(recommend_auto_balance("balance is required: how many layers each partition gets"))
    from .balance import balance_by_parameters, balance_by_time  # with the profiler, which most pipes do without

    partitions = max(1, min(len(checked_devices(devices, 1 if devices is None else len(module))), len(module)))
    if has_data(module):
        return balance_by_time(partitions, module, sample)
    return balance_by_parameters(partitions, module)


# What Trainer reads of a model besides public attributes.
_PRIVATE_OF_MODELS = ("_keys_to_ignore_on_save",)
_OF_THIS_PROCESS = ("_pipeline", "_chooser", "_copy_streams", "_workers", "_laid_out", "_sums", "_past", "_pipelines")
_PARTITION_KEY = re.compile(r"^partitions\.\d+\.")


def indented(text: str) -> str:
    return text.replace("\n", "\n  ")
