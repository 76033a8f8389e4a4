"""A partition as the engine sees it: its layers, its device, and what its layers were seen to do."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from streams import has_streams

from ..checkpoint._device_generator import module_of
from ..checkpoint._random import OUTSIDE
from ..checkpoint._state import State, Training
from ..skip import SkipLayout
from ..skip._layout import skippables
from ..skip._store import Key, routed
from ..values._aliases import packed, unpacked
from ..values._constants import expect_plain
from ..values._leaves import Activation, Arguments, as_nonleaf, versions
from ..values._sharing import expect_unseen, given_state
from ._draws import Draws
from ._tensor_hooks import TensorHooks

_log = logging.getLogger("gpipe")
_training = attrgetter("training")


def stages_of(modules: Iterable[nn.Module], devices: Iterable[torch.device], layout: SkipLayout) -> list[Stage]:
    """A stage of each of the ``modules``, whose layers are numbered from the first of all."""
    stages: list[Stage] = []
    for j, (module, device) in enumerate(zip(modules, devices, strict=True)):
        stages.append(Stage(j, module, device, layout, stages[-1].numbers.stop if stages else 0))
    return stages


class Stage:
    """One partition on its device. It lives as long as its pipe, and so does what is learned about its layers.

    Args:
        first: how many layers of the model come before.

    Attributes:
        numbers: of the layers, in the model; one if nobody tells the layers of ``module`` apart.
        draws: which of them draw random numbers.
        on_accelerator: whether its work is queued on streams.
        rewinds: whether the generator of its device can be put back.
        may_change_input: whether the layers work in place on what they get; true until the first forward of a run has
            shown.
        given: parameters and buffers whose memory the first forward of the run gave away, with their tie.
        module_copies: of modules that an earlier stage has too.
    """

    def __init__(self, index: int, module: nn.Module, device: torch.device, layout: SkipLayout, first: int) -> None:
        self.index = index
        self._told = [*module.children()] if getattr(module, "tells_layers", False) else []
        self.numbers = range(first, first + max(len(self._told), 1))
        self.module = module
        self.device = torch.device("cpu") if device.type == "cpu" else device
        self.on_accelerator = has_streams(device)
        self.rewinds = module_of(device) is not None
        self._pops = [route.key for route in layout.routes if route.target == index]
        self._stashes = [route.key for route in layout.routes if route.source == index]
        self._is_direct = not any(True for _ in skippables(module))
        self.given: list[tuple[Tensor, int]] = []
        self.module_copies: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
        self._seen_outputs = False
        self.may_change_input = True
        self._changes_input = False
        self._changes_late = False
        self._said_whole = False
        self._layers_then = dict(module._modules)
        self.draws = Draws(frozenset(range(OUTSIDE, len(self._told))))
        self._hooks: dict[bool, bool | None] = {}
        self.compared: set[Training] = set()

    def compute(self, inputs: Activation) -> Activation:
        """What the layers make of ``inputs``; they may work in place on them, although these are leaves."""
        if self.may_change_input:
            return self._compute_first(inputs)
        before = versions(inputs) if inputs.ties else []  # else they are nobody else's
        value = inputs.value
        try:
            if self._is_direct and isinstance(value, Tensor):  # as in most stages, which are spared two frames
                output = self.module(value)
                output = output if isinstance(output, Tensor) else self._packed(output)
            else:
                output = self._call(value)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise self._late_change() from error
            raise
        if before and self._changed(inputs, before):
            raise self._late_change()
        return Activation(output)

    def _compute_first(self, inputs: Activation) -> Activation:
        """The same, for the first micro-batch of a run, or if the layers are known to work in place."""
        before = versions(inputs)
        asked = self._hooks.get(self.module.training, False) is None
        call = self._look_for_hooks if asked else self._call
        outputs = Activation(call(as_nonleaf(inputs).value))
        after = versions(inputs)
        if after != before:
            expect_unseen(inputs, before, after)
        self._learn(inputs, outputs, after != before)
        return outputs

    def _changed(self, inputs: Activation, before: Sequence[int]) -> bool:
        after = versions(inputs)
        return after != before and any(t and a != b for t, a, b in zip(inputs.ties, before, after, strict=True))

    def _late_change(self) -> RuntimeError:
        self._changes_late = True
        return RuntimeError(
            "the layers of this partition changed their input in place on this micro-batch but not on the first, by "
            "which a run decides whether they need a copy; run again, since the pipe knows now, or let them work on a "
            "clone"
        )

    def _learn(self, inputs: Activation, outputs: Activation, changed: bool) -> None:
        if not self._seen_outputs:
            self.given = given_state(self.module, outputs.tensors)
            self._seen_outputs = True
        # Inference tensors do not count their changes.
        if changed or not any(map(Tensor.is_inference, inputs.tensors)):
            self._changes_input = self.may_change_input = self._changes_input or changed

    def _look_for_hooks(self, value: Any) -> Any:
        """What :meth:`_call` gives; see whether layers put hooks on tensors, for which :meth:`expect_split` asked."""
        with TensorHooks() as hooks:  # which takes time, and matters only to a split backward
            output = self._call(value)
        self._hooks[self.module.training] = hooks.seen
        return output

    def _call(self, value: Any) -> Any:
        """What the layers make of ``value``, with skips from other stages and for other stages beside it."""
        if self._is_direct:
            return self._layers(value)
        store: dict[Key, Any] = {}  # of this cell: what a failure leaves there goes with it
        if self._pops:
            value, *skips = unpacked(value)
            store.update(zip(self._pops, map(unpacked, skips), strict=True))
        with routed(store):
            output = self._layers(value)
        return (output, *[store.pop(key) for key in self._stashes]) if self._stashes else output

    def _layers(self, value: Any) -> Any:
        value = value if isinstance(value, Tensor) else unpacked(value)
        return self._packed(
            self.module(*value.args, **value.kwargs) if isinstance(value, Arguments) else self.module(value)
        )

    def _packed(self, output: Any) -> Any:
        """``output`` as it goes to the next stage."""
        if isinstance(output, Tensor):
            return output
        expect_plain(output, self.index)
        return packed(output)

    def begin(self) -> None:
        """Forget what the last run has shown: layers may have been changed since."""
        self._changes_input = self._changes_late
        self.may_change_input = True
        self._seen_outputs = False
        self.draws.begin((self.module.training, *map(_training, self._told)))

    def expect_split(self) -> None:
        """Let the next forward look for hooks, unless one has in this training mode."""
        self._hooks.setdefault(self.module.training, None)

    @property
    def may_split(self) -> bool:
        """Whether the backward may run in two parts: both would call the hooks of a tensor where they part."""
        return not self._hooks[self.module.training]

    def forget(self) -> None:
        """Learn everything about the layers anew."""
        self.draws.forget()
        self.state.forget()
        self.compared.clear()

    def with_generators(self) -> frozenset[int]:
        """The layers that have a generator of their own, which shows nowhere when it begins to be used."""
        layers = dict(enumerate(self._told)) or {OUTSIDE: self.module}
        return frozenset(k for k, layer in layers.items() if _brings_generator(layer))

    @cached_property
    def state(self) -> State:
        """What the layers remember between forwards."""
        return State(self.module)

    def expect_current(self) -> None:
        """Raise RuntimeError if a layer was replaced, so that a recomputation would compute something else."""
        if self.module._modules != self._layers_then:
            now = self.module._modules
            names = [name for name, layer in self._layers_then.items() if now.get(name) is not layer]
            raise RuntimeError(
                f"layer {', '.join(map(repr, names))} was replaced between the forward and the backward of a "
                "checkpointed run, whose recomputation would now compute something else; replace it after backward(), "
                "or use checkpoint='never'"
            )

    def say_whole(self) -> None:
        """Say, once, that the backward of this stage cannot be split."""
        if not self._said_whole:
            self._said_whole = True
            _log.warning(
                "the backward of partition %d cannot be split into inputs and weights; it runs whole", self.index
            )

    @property
    def runs_whole(self) -> bool:
        """Whether a backward that was to be split could not be."""
        return self._said_whole

    @property
    def layers(self) -> str:
        """The names of the first and the last layer."""
        names = [f"'{name}'" for name, _ in self.module.named_children()]
        return " to ".join(names if len(names) < 2 else (names[0], names[-1])) or "none"


def _brings_generator(layer: nn.Module) -> bool:
    return any(isinstance(value, torch.Generator) for module in layer.modules() for value in vars(module).values())
