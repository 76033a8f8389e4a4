"""The forward of a model once more, for all rows: its blocks are answered with what they returned for micro-batches.

So the output is exactly what the model returns for the whole mini-batch: a loss of any kind, similarities of all rows
with each other, an output of any class.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streams import current_stream, wait_stream

from .._flatten._collected import collector
from ..engine._autograd import attach
from ..engine._whole_loss import WholeLoss
from ..values._leaves import Activation, as_arguments
from ..values._sharing import marks_of, with_marks
from ._between import Between
from ._called import answered_by
from ._facts import Answer, Facts
from ._tree import changed


class Replay:
    """Answers the calls of blocks in one forward for all rows.

    Args:
        model: the model.
        facts: what blocks have returned, without tensors.
        used: the tensors of these that the model uses, for all rows.
        devices: the device of each stage.
    """

    def __init__(
        self, model: nn.Module, facts: Facts, used: Mapping[str, Tensor], devices: Sequence[torch.device]
    ) -> None:
        self._model, self._answers, self._devices = model, facts.answers, devices
        self._used: dict[int, dict[int, Tensor]] = {}
        for place, tensor in used.items():
            call, leaf = map(int, place.split())
            self._used.setdefault(call, {})[leaf] = tensor
        self._calls = self._stage = 0
        self._moves = len({*devices}) > 1
        self._placeholders: dict[int, Tensor] = {}
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def output(self, inputs: Any) -> Any:
        """Return what the model returns for ``inputs``."""
        arguments = as_arguments(inputs)
        begin = self._devices[0]
        args, kwargs = (changed(part, lambda tensor: tensor.to(begin)) for part in (arguments.args, arguments.kwargs))
        self._between = Between(self)
        try:
            with answered_by(self), self._between:
                output = self._model(*args, **kwargs)
                with self._between.off():
                    self._stage = len(self._devices) - 1
                    output = changed(output, self.here)
        finally:
            del self._between  # which refers to this object
        if self._calls != len(self._answers):
            raise _other(self._model, self._calls, len(self._answers))
        return output

    def call(self, stage: int, module: nn.Module, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Return what a block has returned."""
        if self._calls == len(self._answers):
            raise _other(self._model, self._calls + 1, len(self._answers))
        answer: Answer = self._answers[self._calls]
        if answer.block != name:
            raise RuntimeError(
                f"{type(self._model).__name__} called {name!r} for all rows where it called {answer.block!r} for a "
                f"micro-batch; {_SAME}"
            )
        with self._between.off():
            self._stage = max(self._stage, stage)
            (output, collected), placeholders = answer.filled(self._used.get(self._calls, {}))
            for kind, values in collected.items():
                collector()[kind].extend(values)
        self._placeholders.update((id(each), each) for each in placeholders)
        self._calls += 1
        return output

    def here(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the device of the stage that computes here."""
        self.read(tensor)
        if not self._moves:
            return tensor
        # A copy takes the place of its tensor for good, since it may be changed in place.
        while (known := self._moved.get(id(tensor))) is not None and known[0] is tensor:
            tensor = known[1]
        copy = self._on_device(tensor)
        if copy is not tensor:
            self._moved[id(tensor)] = tensor, copy
        return copy

    def made(self, output: Any) -> Any:
        """Return the output of an operation on the device of the stage: it may have named that of another one."""
        return changed(output, self._on_device) if self._moves else output

    def _on_device(self, tensor: Tensor) -> Tensor:
        device = self._devices[self._stage]
        if tensor.device == device or tensor.device not in self._devices:
            return tensor
        return tensor if not tensor.dim() and tensor.device.type == "cpu" else tensor.to(device)

    def read(self, tensor: Tensor) -> None:
        if self._placeholders.get(id(tensor)) is tensor:
            raise RuntimeError(
                f"{type(self._model).__name__} uses an output of a block for all rows that it did not use for a "
                f"micro-batch; {_SAME}"
            )


_SAME = "its forward must call the same blocks, in the same order, whatever the rows are"


def _other(model: nn.Module, calls: int, known: int) -> RuntimeError:
    return RuntimeError(
        f"{type(model).__name__} called {calls} blocks for all rows, and {known} for a micro-batch; {_SAME}"
    )


def ordered(output: Any, devices: Collection[torch.device]) -> Any:
    """Return ``output`` behind a node, in whose backward the streams of now wait for those of the caller then.

    Autograd lets only the device of the output wait. But the caller may just have set a gradient on another device to
    zero, of a parameter that the model itself uses there.
    """
    used = {device: current_stream(device) for device in devices if device.type != "cpu"}
    if not used or len(devices) == 1 or not torch.is_grad_enabled():
        return output

    def backward(gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        for device, stream in used.items():
            wait_stream(stream, current_stream(device))
        return gradients

    found = {id(tensor): tensor for tensor in Activation(output).tensors if tensor.requires_grad}
    fresh = dict(zip(found, attach(backward, [*found.values()], [*found.values()]), strict=True))
    return changed(output, lambda tensor: fresh.get(id(tensor), tensor))


class ReplayedLoss(WholeLoss):
    """The loss of all rows, of what the model computes for them from what its blocks have returned."""


def joined(outputs: Sequence[Activation], rows: Sequence[int], facts: Facts) -> Activation:
    """Return the used tensors of all micro-batches, each for all rows.

    Args:
        outputs: for each micro-batch, the output of the model or None, and the used tensors by place.
        rows: the number of rows of each micro-batch.

    Raises:
        RuntimeError: a tensor has no dimension of rows, or is used for some micro-batches only.
    """
    if len(outputs) == 1:
        used = outputs[0].value[1]
        return with_marks(Activation(used), marks_of(outputs[0])[-len(used) :] if used else [])
    found: dict[str, Tensor] = {}
    for place in {place: None for each in outputs for place in each.value[1]}:
        parts = [each.value[1].get(place) for each in outputs]
        call, _ = map(int, place.split())
        found[place] = _cat(parts, rows, facts.answers[call].block)
    return Activation(found)


def _cat(parts: Sequence[Tensor | None], rows: Sequence[int], block: str) -> Tensor:
    tensors = [part for part in parts if part is not None]
    if len(tensors) < len(parts):
        raise RuntimeError(f"the model uses an output of block {block!r} for some micro-batches only; {_SAME}")
    has_rows = (
        all(tensor.dim() for tensor in tensors)
        and len({tensor.shape[0] / max(1, count) for tensor, count in zip(tensors, rows, strict=True)}) == 1
    )
    if not has_rows:
        raise RuntimeError(
            f"block {block!r} returned a tensor of shape {tuple(tensors[0].shape)} for {rows[0]} rows, which the model "
            "uses itself, and which has no rows to join; give out_spec=, or a loss_fn that returns "
            "gpipe.LossSum(total, count)"
        )
    return torch.cat(tensors)
