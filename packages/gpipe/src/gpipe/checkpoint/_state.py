"""The state of the layers of a stage, restored for a recomputation to what it was before the forward.

The state is in buffers and in attributes of modules: numbers, flags, tensors. A recomputation uses copies of them from
before its forward; afterwards they have the values from before the recomputation. So it computes what the forward did,
and no change is made twice. Parameters are not copied: they must not change. A forward that changes its own parameters
cannot be repeated, and keeps its graph instead.

Small tensors are copied before every forward, and a recomputation uses the copies: kernels, NumPy or ``.data`` may
change statistics without counting it, and to compare values would make the host wait for an accelerator. Large ones,
such as masks, are copied before the first forward of each training mode, and in later forwards if that one has changed
them. Other changes are detected by the identity or the version of a tensor, which are compared around every forward and
recomputation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._fsdp import fsdp_modules
from ._contents import changed, contents_of
from ._snapshot import Sight, Slot, View

Training = tuple[bool, ...]
"""``training`` of every module of a stage, in order."""

SMALL = 4096
"""Elements up to which a tensor is copied just in case."""

_log = logging.getLogger("gpipe")


class Snapshot:
    """The state that the recomputation of a cell needs.

    Attributes:
        sight: all values before the forward.
        copies: copies of tensors that are not parameters.
        bare: the versions of tensors that were not copied, since no in-place change is expected.
        due: the slots that the forward was seen to change; they are restored whatever they contain now.
        initialises: whether the forward gives lazy layers their parameters.
    """

    __slots__ = ("bare", "copies", "due", "initialises", "sight", "training")

    def __init__(self, training: Training, sight: Sight) -> None:
        self.training = training
        self.sight = sight
        self.copies: dict[Slot, Tensor] = {}
        self.bare: dict[Slot, int] = {}
        self.due: set[Slot] = set()
        self.initialises = False

    def keep(self, at: int, *, copied: bool) -> None:
        """Make it possible to restore the tensor at this index of the sight."""
        slot, value = self.sight.slots[at], self.sight.values[at]
        if copied and not value.requires_grad and not is_lazy(value):
            self.copies[slot] = value.clone()
            return
        self.bare[slot] = self.sight.versions[at]
        if not value.is_leaf:
            self.sight.values[at] = self.copies[slot] = _without_graph(value)

    def recoverable(self, slot: Slot) -> bool:
        """Whether the value that was in ``slot`` before the forward can be restored."""
        if slot.kind == "_parameters":
            return is_renormed(slot)
        return slot not in self.bare or self.once_more(slot)._version == self.bare[slot]

    def once_more(self, slot: Slot) -> Any:
        """The value for ``slot`` in a recomputation, which may change it."""
        return self.copies[slot] if slot in self.copies else self.sight.value(slot)


class StateGuard:
    """The memory of parameters and large buffers of a stage, and whether they require grad, to detect changes."""

    def __init__(self, remembered: Snapshot) -> None:
        sight = remembered.sight
        self._tensors = [
            (slot, value)
            for slot, value in zip(sight.slots, sight.values, strict=True)
            if isinstance(value, Tensor)
            and (slot.kind == "_parameters" or (slot.kind == "_buffers" and slot in remembered.bare))
        ]
        self._seen = [_ground(tensor) for _, tensor in self._tensors]

    def moved(self) -> list[Slot]:
        """The slots of tensors that were given other memory by ``.data``, or frozen, or unfrozen."""
        return [slot for (slot, tensor), seen in zip(self._tensors, self._seen, strict=True) if _ground(tensor) != seen]


class StateFacts(NamedTuple):
    """How forwards change the state of the layers of a stage, as far as runs have shown.

    Attributes:
        moving: by training mode, the slots that are copied before every forward.
        unrepeatable: the training modes in which forwards change parameters, so that their graphs are kept.
    """

    moving: Mapping[Training, frozenset[Slot]] = {}
    unrepeatable: frozenset[Training] = frozenset()


class State:
    """The state of the layers of a stage in one run.

    A layer with a true attribute ``recomputes_without_buffers`` neither reads nor changes its own in a recomputation.

    Args:
        module: the layers.
        facts: what runs before have shown.

    Attributes:
        facts: the same, and what this run has shown.
    """

    def __init__(self, module: nn.Module, facts: StateFacts) -> None:
        self._module = module
        self._modules: list[nn.Module] = []
        self._view = View([], [])
        self.facts = facts

    def begin(self) -> None:
        """Before the first forward: read all values."""
        self._modules = list(self._module.modules())
        self._expect_readable()
        ignored = [m for m in self._modules if getattr(m, "recomputes_without_buffers", False)]
        # FSDP's hooks replace the parameters for a forward, and again for its recomputation.
        sharded = [m for each in fsdp_modules(self._module) for m in each.modules()]
        self._view = View(self._modules, ignored, sharded)

    def _expect_readable(self) -> None:
        """Raise RuntimeError that names a scripted or traced module: its state is not in Python."""
        for name, module in self._module.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise RuntimeError(
                    f"{name!r} is a scripted module ({type(module).__name__}), whose state cannot be restored for a "
                    "recomputation; use checkpoint='never' for it, or torch.compile instead of torch.jit"
                )

    @property
    def training(self) -> Training:
        """``training`` of every module that was there when the run began."""
        return tuple([module.training for module in self._modules])

    def forget(self) -> None:
        """Drop what is known about changes, and learn it again."""
        self.facts = self.facts._replace(moving={})

    def remember(self, training: Training) -> Snapshot:
        """The snapshot before a forward."""
        sight = self._view.look()
        remembered = Snapshot(training, sight)
        moving = self.facts.moving.get(training)
        if moving is None:
            remembered.initialises = any(map(is_lazy, sight.values))
        for at in range(self._view.parameters, len(sight.slots)):
            slot, value = sight.slots[at], sight.values[at]
            if isinstance(value, Tensor):
                remembered.keep(at, copied=moving is None or slot in moving or value.numel() <= SMALL)
        return remembered

    def settle(self, remembered: Snapshot) -> bool:
        """After the forward: learn what it has changed. Returns whether a recomputation can repeat it."""
        training, sight = remembered.training, remembered.sight
        moved = sight.moved(self._view.look())
        remembered.due = {slot for slot in moved if slot.kind != "_parameters"}
        if training not in self.facts.moving:
            self._find_large(remembered, moved)
        lost = [slot for slot in moved if not remembered.recoverable(slot)]
        self._add_moving(training, [slot for slot in lost if slot.kind != "_parameters"])
        own = [slot for slot in lost if slot.kind == "_parameters" and isinstance(sight.value(slot), Tensor)]
        if own and not remembered.initialises:
            self._say_unrepeatable(own)
            self.facts = self.facts._replace(unrepeatable=self.facts.unrepeatable | {training})
        return not lost and training not in self.facts.unrepeatable

    def _add_moving(self, training: Training, slots: Iterable[Slot]) -> None:
        before = self.facts.moving.get(training, frozenset())
        if training not in self.facts.moving or not before.issuperset(slots):
            self.facts = self.facts._replace(moving={**self.facts.moving, training: before.union(slots)})

    @contextmanager
    def restored(self, remembered: Snapshot, *, still: bool) -> Iterator[None]:
        """A context for a recomputation, with the state from before its forward; afterwards the state is as now.

        Args:
            still: whether to check that the recomputation changes nothing that its forward did not change.

        Raises:
            RuntimeError: it does, or a value has changed that cannot be restored.
        """
        now = self._view.look()
        moved = remembered.sight.moved(now)
        gone = [slot for slot in moved if not remembered.recoverable(slot)]
        if gone:
            raise RuntimeError(self._gone(gone, remembered.training))
        back = {slot for slot in moved if slot.kind != "_parameters"} | remembered.due | remembered.copies.keys()
        own = [(slot, slot.value) for slot in back]
        for slot in back:
            slot.value = remembered.once_more(slot)
        held = contents_of(self._modules) if still else {}
        try:
            yield
            if still:
                self._say_counted(changed(held, contents_of(self._modules)), {*map(_place, back)})
        finally:
            for slot, value in own:
                slot.value = value
        if still:
            self._expect_still(now.moved(self._view.look()))

    def expect_same(self, grounds: StateGuard) -> None:
        """Raise RuntimeError that names what was given other memory, frozen or unfrozen."""
        moved = grounds.moved()
        if moved:
            raise RuntimeError(self._gone(moved, ()))

    def _find_large(self, remembered: Snapshot, moved: Sequence[Slot]) -> None:
        """After the first forward: find the large tensors that it has changed, and drop the copies of all others."""
        large = {slot: copy for slot, copy in remembered.copies.items() if copy.numel() > SMALL}
        changed = [slot for slot, copy in large.items() if slot in moved or _changed(slot, copy)]
        self._add_moving(remembered.training, changed)
        for slot in large.keys() - set(changed):
            del remembered.copies[slot]
            remembered.bare[slot] = slot.value._version

    def _gone(self, slots: Sequence[Slot], training: Training) -> str:
        if training in self.facts.unrepeatable:
            return (
                f"the forward of a later micro-batch changed {self._names(slots)}, which the recomputation of this one "
                "needs as it was; run this mini-batch again: from now on the pipeline keeps the graph of this "
                "partition, as with checkpoint='never'"
            )
        return (
            f"{self._names(slots)} changed between the forward and the backward of a checkpointed run, whose "
            "recomputation would now compute something else; change it after backward() (optimizer.step() comes "
            "last), or use checkpoint='never'"
        )

    def _expect_still(self, moved: Sequence[Slot]) -> None:
        changed = [slot for slot in moved if slot.kind != "attribute" and not is_renormed(slot)]
        if changed:
            raise RuntimeError(
                f"the recomputation changed {self._names(changed)}, which its forward did not; let the layer change it "
                "only if not gpipe.is_recomputing(), or use checkpoint='never'"
            )

    def _say_counted(self, changed: Sequence[tuple[nn.Module, str]], restored: Set[tuple[nn.Module, str]]) -> None:
        found = [Slot(owner, "attribute", name) for owner, name in changed if (owner, name) not in restored]
        if found:
            _log.warning(
                "a recomputation changed what %s contains, as its forward did: what is counted there counts twice, "
                "unless the layer asks gpipe.is_recomputing()",
                self._names(found),
            )

    def _say_unrepeatable(self, slots: Sequence[Slot]) -> None:
        if not self.facts.unrepeatable:
            _log.warning("a forward changes %s: graphs are kept instead of recomputed", self._names(slots))

    def _names(self, slots: Iterable[Slot]) -> str:
        prefixes = {id(owner): prefix for prefix, owner in self._module.named_modules()}
        return ", ".join(repr(f"{prefixes.get(id(slot.owner), '')}.{slot.name}".lstrip(".")) for slot in slots)


def _place(slot: Slot) -> tuple[nn.Module, str]:
    return slot.owner, slot.name


def _without_graph(value: Tensor) -> Tensor:
    """``value`` detached, so that it keeps no graph alive and gets no gradient."""
    leaf = value.detach().requires_grad_()
    leaf.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
    return leaf


def _refuse_gradient(gradient: Tensor) -> None:
    raise RuntimeError(
        "a layer uses a tensor that it kept in an attribute in an earlier forward, whose graph is gone under "
        "checkpointing; keep it detached, or use checkpoint='never'"
    )


def _ground(tensor: Tensor) -> tuple[int, bool]:
    memory = tensor.untyped_storage()._cdata if tensor.layout is torch.strided and not is_lazy(tensor) else 0
    return memory, tensor.requires_grad


def is_renormed(slot: Slot) -> bool:
    """Whether a forward changes this parameter in a way that has no further effect when it is repeated."""
    owner = slot.owner
    return slot.name == "weight" and isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.max_norm is not None


def _changed(slot: Slot, copy: Tensor) -> bool:
    value = slot.value
    return value.shape != copy.shape or not torch.equal(value.detach(), copy.detach())
