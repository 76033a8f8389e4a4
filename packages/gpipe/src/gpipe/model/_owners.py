"""Detect tensors that one forward computes between its blocks, and the forward of a different micro-batch uses.

A forward may store such a tensor in an attribute of the model or in a global. Forwards of several micro-batches are in
flight at the same time, so the attribute holds the tensor of the forward that set it last. In a plain loop over
micro-batches, a forward finds its own tensor or the previous micro-batch's. If timing can change this, an error is
raised.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from .._current import current
from ..values._by_tensor import ByTensor
from ..values._leaves import version
from ._tree import map_tree


class _Owner(NamedTuple):
    """The forward that computed a tensor.

    Attributes:
        run: the number of the run.
        microbatch: its micro-batch; None if several forwards have received the same tensor, such as a cached table.
        stage: the stage that computed the tensor.
    """

    run: int
    microbatch: int | None
    stage: int


class Owners:
    """Maps tensors that depend on rows of a micro-batch, or on random numbers, to the forward that computed them."""

    def __init__(self) -> None:
        self.run = 0
        self._found = ByTensor[_Owner]()

    def begin_run(self) -> None:
        """Begin a run. Live tensors keep their owners from earlier runs."""
        self.run += 1
        self._found.remove_freed()

    def of(self, tensor: Tensor) -> _Owner | None:
        return self._found.get(tensor)

    def add(self, tensor: Tensor, microbatch: int, stage: int, *, replaces: bool = False) -> None:
        """Record the owner of ``tensor``. With ``replaces``, its values are new and an earlier owner is dropped."""
        before = None if replaces else self.of(tensor)
        if before is None:
            self._found[tensor] = _Owner(self.run, microbatch, stage)
        elif (before.run, before.microbatch) != (self.run, microbatch):
            self._found[tensor] = before._replace(microbatch=None)


class Owned:
    """The tensors of one forward.

    Args:
        owners: the owners of tensors of all forwards.
        microbatch: the index of the forward's micro-batch.
        model: the name of the model, for errors.
        is_of_model: returns whether a tensor is a parameter or buffer of the model.
    """

    def __init__(self, owners: Owners, microbatch: int, model: str, is_of_model: Callable[[Tensor], bool]) -> None:
        self._owners, self._microbatch, self._model, self._is_of_model = owners, microbatch, model, is_of_model
        self._has_values = False  # the model has Python values that depend on its rows
        self._given: list[tuple[Tensor, int]] = []  # tensors that the current operation uses, with their versions
        self._common: set[int] = set()  # the ids of used tensors without an owner
        self._depends = False
        self._draws = 0

    def begin(self) -> None:
        """Begin an operation. Call :meth:`read` next for each tensor that it uses."""
        self._given, self._common = [], set()
        self._depends, self._draws = self._has_values, current.work.rng.draws

    def read(self, tensor: Tensor, stage: int) -> None:
        """Note that an operation of ``stage`` uses ``tensor``.

        Raises:
            RuntimeError: the tensor belongs to a different micro-batch, and which one depends on timing.
        """
        self._given.append((tensor, version(tensor)))
        owner = self._owners.of(tensor)
        if owner is None:
            self._common.add(id(tensor))
            return
        self._depends = True
        if owner.microbatch is not None and self._is_by_chance(owner, stage):
            raise RuntimeError(
                f"for micro-batch {self._microbatch} {self._model} uses a tensor of shape {tuple(tensor.shape)} that "
                f"its forward for micro-batch {owner.microbatch} has computed; if the model stores such a tensor in an "
                "attribute, a global or a hook, a forward may find any micro-batch's tensor there, because several are "
                "in flight at the same time; store it in a local variable and pass it as an argument"
            )

    def add_copy(self, copy: Tensor, tensor: Tensor) -> None:
        """Note that the operation receives ``copy`` instead of ``tensor``."""
        if id(tensor) in self._common:
            self._common.add(id(copy))

    def _is_by_chance(self, owner: _Owner, stage: int) -> bool:
        """Return whether the forward may have found a different tensor than in a plain loop over micro-batches.

        When a forward reaches a stage, the forwards of all earlier micro-batches have finished this stage, but maybe
        not the next one.
        """
        if owner.run == self._owners.run:
            assert owner.microbatch is not None
            is_earlier = owner.microbatch < self._microbatch
            return owner.microbatch != self._microbatch and not (is_earlier and owner.stage <= stage)
        return bool(self._microbatch) and owner.stage > stage

    def find_altered(self) -> list[Tensor]:
        """Return the tensors that the current operation has modified in place."""
        return [tensor for tensor, before in self._given if version(tensor) != before]

    def clear(self) -> None:
        """Release the tensors of the current operation."""
        self._given = []

    def end(self, output: Any, stage: int) -> None:
        """Note the results of an operation of ``stage``: its ``output``, and tensors that it has modified in place."""
        if self._depends or current.work.rng.draws != self._draws:
            self._has_values |= output is not None and not isinstance(output, Tensor | tuple | list)
            self.end_block(output, stage)
        self.clear()

    def end_block(self, output: Any, stage: int) -> None:
        """Note the results of a block of ``stage``, as :meth:`end` does. They always depend on the rows."""
        for tensor in self.find_altered():
            for each in (tensor, tensor._base):
                if each is not None:
                    self._owners.add(each, self._microbatch, stage, replaces=True)
        self.clear()
        self.add(output, stage)

    def add(self, output: Any, stage: int) -> None:
        """Note the tensors of ``output``, which an operation or a block of ``stage`` has computed.

        Arguments without an owner remain without one, as in ``table.to(x)``.
        """
        map_tree(output, partial(self._add, stage))

    def _add(self, stage: int, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._common and not self._is_of_model(tensor):
            self._owners.add(tensor, self._microbatch, stage)
        return tensor
