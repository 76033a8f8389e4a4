"""Remember the convention that a model's losses follow, for each kind of mini-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from microbatch import Arguments, Batch

from ..values._leaves import as_arguments
from ._configured import collect_settings
from ._convention import Convention, find_convention, may_follow
from ._count import COUNT
from ._facts import Facts, get_kind

TRIALS = 4
"""The number of trials for inputs of one kind. A model whose attributes change in each step is not tried forever."""


class Conventions:
    """The conventions of a model, by kind. The kind None stands for losses that do not add up."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        self._model, self._blocks = model, blocks
        self._found: dict[Any, Convention | None] = {}
        self._trials = Counter[Any]()
        self._held: list[Any] = []

    def find_kind(self, inputs: Any) -> Any:
        """Return the kind of the loss for ``inputs``; None if it does not follow the convention."""
        if not isinstance(inputs, Arguments) or not may_follow(self._model, inputs):
            return None
        kwargs = {name: value for name, value in inputs.kwargs.items() if name != COUNT}
        kind = get_kind(Arguments(inputs.args, kwargs))
        return None if self._trials[kind] == TRIALS else kind

    def __contains__(self, kind: Any) -> bool:
        return kind is None or self._key(kind) in self._found

    def __getitem__(self, kind: Any) -> Convention | None:
        """Return the convention of a kind; None if the kind follows none, or was not tested yet."""
        return None if kind is None else self._found.get(self._key(kind))

    def learn(self, kind: Any, facts: Facts, batch: Batch) -> None:
        """Test the convention for a kind, using the ``facts`` from the forward of a micro-batch."""
        inputs = as_arguments(batch.value)
        self.keep(kind, find_convention(self._model, self._blocks, facts, Arguments(*inputs), batch.rows[0]))

    def keep(self, kind: Any, found: Convention | None) -> None:
        """Store the convention of a kind, which was tested in this process or in a different one."""
        self._trials[kind] += 1
        settings = collect_settings(self._model, self._blocks.values())
        self._held.append(settings.held)
        self._found[kind, settings.key] = found

    def _key(self, kind: Any) -> Any:
        return kind, collect_settings(self._model, self._blocks.values()).key
