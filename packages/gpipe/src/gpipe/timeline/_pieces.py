"""What stages take of which only some layers are computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..schedule import Kind
from ..schedule._flags import Checkpoint, StageCheckpoint, expect_flags, scheduled
from ._costs import StageCost


def in_pieces(
    costs: Sequence[StageCost], checkpoint: Checkpoint | None
) -> tuple[Sequence[StageCost], str | list[str] | None]:
    """The costs with forwards of layers that have a flag as parts of backwards, and the modes of the stages.

    Args:
        costs: of each stage.
        checkpoint: as of :class:`gpipe.GPipe`; None is left to the schedule.

    Raises:
        TypeError: a flag is neither True nor False.
        ValueError: the numbers of stages or layers differ, or a stage has no flags.
    """
    if checkpoint is None or isinstance(checkpoint, str):
        return costs, checkpoint
    modes = [_mode(each, f"checkpoint[{j}]") for j, each in enumerate(checkpoint)]
    if len(modes) != len(costs):
        return costs, modes  # which is refused by those who take modes
    found = list(costs)
    for j, each in enumerate(checkpoint):
        if not isinstance(each, str):
            again = _again(costs[j], each, f"checkpoint[{j}]")
            found[j] = again if modes[j] == "never" else costs[j]
    return found, modes


def _mode(each: StageCheckpoint, name: str) -> str:
    """What the schedule sees of a stage with this mode or these flags."""
    if not isinstance(each, str):
        expect_flags(each, name)
        if not each:
            raise ValueError(f"{name}: expected a mode, or a flag for each layer of the stage; got none")
    return scheduled(each)


def _again(cost: StageCost, flags: Sequence[bool], name: str) -> StageCost:
    parts = cost.parts(len(flags))
    if len(parts) != len(flags):
        raise ValueError(f"{name} must have a flag for each of the {len(parts)} layers of the stage; got {len(flags)}")
    slower = cost.seconds(Kind.RECOMPUTE) / cost.forward if cost.forward else 1.0
    again = slower * sum(part.forward for part, flag in zip(parts, flags, strict=True) if flag)
    # The output of a run is the input of the next layer, which keeps it.
    ends = [flag and not after for flag, after in zip(flags, [*flags[1:], True], strict=True)]
    gone = sum(part.kept for part, flag in zip(parts, flags, strict=True) if flag)
    left = sum(part.output for part, is_end in zip(parts, ends, strict=True) if is_end)
    return replace(
        cost,
        backward=cost.backward + again,
        backward_input=cost.seconds(Kind.BACKWARD_INPUT) + again,
        backward_weight=cost.seconds(Kind.BACKWARD_WEIGHT),
        activation_bytes=max(0, cost.activation_bytes - gone + left),
    )
