"""What runs have shown about the layers of a stage: one record, with which a run begins, and which it adds to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..checkpoint._state import StateFacts, Training
from ._draws import DrawFacts


class StageFacts(NamedTuple):
    """What is known of a stage. Nobody changes it: who learns more makes another one.

    Attributes:
        draws: which layers draw random numbers.
        state: which of their buffers and attributes forwards change.
        compared: the training modes in which a whole recomputation was compared with its forward.
        changes_late: whether layers worked in place on a later micro-batch, although they did not on the first.
        hooks: by training mode of the stage, whether layers put hooks on tensors.
        runs_whole: whether a backward that was to be split could not be.
    """

    draws: DrawFacts = DrawFacts()
    state: StateFacts = StateFacts()
    compared: frozenset[Training] = frozenset()
    changes_late: bool = False
    hooks: Mapping[bool, bool] = {}
    runs_whole: bool = False
