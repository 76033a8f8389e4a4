"""What runs have shown about the layers of a stage: a record that each run starts from, and extends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..checkpoint._state import StateFacts, Training


class StageFacts(NamedTuple):
    """What runs have shown about a stage. Immutable: a run that learns more makes a new record.

    Attributes:
        state: which of their buffers and attributes forwards change.
        compared: the training modes in which a whole recomputation was compared with its forward.
        changes_late: whether layers changed a later micro-batch in place, although they did not change the first.
        hooks: by training mode of the stage, whether layers put hooks on tensors.
        runs_whole: whether the backward could not be split in a schedule that splits it.
    """

    state: StateFacts = StateFacts()
    compared: frozenset[Training] = frozenset()
    changes_late: bool = False
    hooks: Mapping[bool, bool] = {}
    runs_whole: bool = False
