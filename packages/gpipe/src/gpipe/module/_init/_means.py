"""The argument ``init`` of ``GPipe``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from ._files import source_at
from ._load import Loaded
from ._model import Layers
from ._own import Applied, Reset
from ._sources import Entries


class Means(Protocol):
    """Gives the layers of a model their values."""

    def expect(self, layers: Layers) -> None:
        """Raise, before anything changes, if this cannot be done for ``layers``."""

    def fill(self, layers: Layers, name: str, fresh: Mapping[int, Tensor]) -> None:
        """Give values to the tensors of one layer, among them the ``fresh`` ones, which have memory and no values."""


def means_of(init: Any) -> Means | None:
    """The means of ``init``; None if there is none."""
    if init is None or init is False:
        return None
    if init is True or (isinstance(init, str) and init == "reset"):
        return Reset()
    if isinstance(init, Mapping):
        return Loaded(Entries(init))
    if isinstance(init, (str, os.PathLike)):
        return Loaded(source_at(init))
    if callable(init):
        return Applied(init)
    raise TypeError(
        "init must be 'reset', a function of a module, a state dict, or the path of a checkpoint; "
        f"got {type(init).__name__}"
    )
