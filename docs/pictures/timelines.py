"""Draw the timelines of docs/benchmarks/timeline.md, and print its table.

python docs/pictures/timelines.py
"""

from __future__ import annotations

from pathlib import Path

from gpipe.schedule import (
    dualpipev,
    fill_drain,
    interleaved,
    interleaved_zero_bubble,
    looped_bfs,
    one_forward_one_backward,
    zbv,
    zero_bubble,
)
from gpipe.simulate import StageCost, simulate

HERE = Path(__file__).parent
MIB = 2**20


def stage(layers: str, share: float = 1.0) -> StageCost:
    """A backward takes twice as long as a forward; half a stage takes half of the time and of the memory."""
    return StageCost(
        forward=0.001 * share,
        backward=0.002 * share,
        activation_bytes=round(16 * MIB * share),
        boundary_bytes=MIB,
        layers=layers,
    )


def main() -> None:
    m, n = 8, 4
    whole = [stage(f"layers {6 * j}–{6 * j + 5}") for j in range(n)]
    half = [stage(f"layers {3 * j}–{3 * j + 2}", 1 / 2) for j in range(2 * n)]
    timelines = {
        "fill-drain": simulate(fill_drain(m, n), whole),
        "fill-drain, all but the last checkpointed": simulate(fill_drain(m, n, checkpoint_stop=m - 1), whole),
        "1F1B": simulate(one_forward_one_backward(m, n), whole),
        "interleaved, two half stages a worker": simulate(interleaved(m, 2 * n, n), half),
        "looped BFS, two half stages a worker": simulate(looped_bfs(m, 2 * n, n), half),
        "zero bubble": simulate(zero_bubble(m, n), whole),
        "interleaved zero bubble, two half stages a worker": simulate(interleaved_zero_bubble(m, 2 * n, n), half),
        "ZB-V, two half stages a worker": simulate(zbv(m, 2 * n), half),
        "DualPipeV, two half stages a worker": simulate(dualpipev(m, 2 * n), half),
    }
    for name, timeline in timelines.items():
        peaks = [max(size for _, size in timeline.held(*(e.stage for e in lane))) for lane in timeline.lanes.values()]
        memory = " – ".join(f"{peak // MIB}" for peak in dict.fromkeys((max(peaks), min(peaks))))
        print(f"| {name} | {timeline.makespan * 1e3:g} ms | {timeline.bubble:.1%} | {memory} MiB |")
    (first, *_), (timeline, *others) = timelines.keys(), timelines.values()
    timeline.save(HERE / "schedules.svg", title=first, compare_with=dict(zip(list(timelines)[1:], others, strict=True)))
    many = simulate(one_forward_one_backward(64, 8), [stage(f"layers {3 * j}–{3 * j + 2}") for j in range(8)])
    many.save(HERE / "timeline-8x64.svg", title="1F1B")


if __name__ == "__main__":
    main()
