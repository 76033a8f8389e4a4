"""What runs have shown about the layers of a stage. Each run starts from it and extends it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ._recomputation import RecomputationFacts


@dataclass
class StageFacts:
    """What runs have shown about a stage. Runs of a pipe take turns, so that one at a time writes to it.

    Attributes:
        recomputation: about recomputing the stage as a whole.
        changes_late: whether layers changed a later micro-batch in place, although they did not change the first.
        hooks: by training mode of the stage, whether layers put hooks on tensors.
        runs_whole: whether the backward could not be split in a schedule that splits it.
    """

    recomputation: RecomputationFacts = field(default_factory=RecomputationFacts)
    changes_late: bool = False
    hooks: dict[bool, bool] = field(default_factory=dict)
    runs_whole: bool = False
