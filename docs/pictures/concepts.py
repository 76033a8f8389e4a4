"""Draw the pictures of docs/concepts.md.

python docs/pictures/concepts.py
"""

from __future__ import annotations

from pathlib import Path

from gpipe.schedule import fill_drain, one_forward_one_backward
from gpipe.simulate import StageCost, simulate
from gpipe.timeline import Timeline

HERE = Path(__file__).parent
MIB = 2**20
STAGES = 4


def costs(chunks: int) -> list[StageCost]:
    """Return the costs of a micro-batch on four equal stages, each 8 s forward and 16 s backward per mini-batch."""
    return [
        StageCost(
            forward=8 / chunks,
            backward=16 / chunks,
            activation_bytes=8 * MIB // chunks,
            boundary_bytes=MIB // chunks,
            layers=f"stage {j}",
        )
        for j in range(STAGES)
    ]


def drawn() -> dict[str, dict[str, Timeline]]:
    """Return the timelines of each picture by their titles."""
    return {
        "concepts-bubble.svg": {
            "one mini-batch": simulate(fill_drain(1, STAGES), costs(1)),
            "four micro-batches": simulate(fill_drain(4, STAGES), costs(4)),
        },
        "concepts-schedules.svg": {
            "fill-drain": simulate(fill_drain(8, STAGES), costs(8)),
            "1F1B": simulate(one_forward_one_backward(8, STAGES), costs(8)),
        },
        "concepts-checkpointing.svg": {
            "1F1B": simulate("1f1b", costs(8), microbatches=8),
            "1F1B, checkpointed": simulate("1f1b", costs(8), microbatches=8, checkpoint="always"),
        },
    }


def main(folder: Path = HERE) -> None:
    for name, timelines in drawn().items():
        (title, first), *others = timelines.items()
        first.save(folder / name, title=title, compare_with=dict(others))


if __name__ == "__main__":
    main()
