"""The timelines on the page about schedules match the schedules."""

import re
from pathlib import Path

from gpipe.schedule import WorkerSteps, looped_placement, named, replay, v_placement

PAGE = Path(__file__).parents[1] / "docs" / "schedules.md"
LOOPS, V = looped_placement(4, 2), v_placement(4)

DRAWN = {
    "Fill-drain": [named("fill_drain", 4, range(3)).on(range(3)), named("fill_drain", 4, range(3), 3).on(range(3))],
    "1F1B": [named("1f1b", 4, range(3)).on(range(3))],
    "Interleaved": [named("interleaved", 4, LOOPS).on(LOOPS)],
    "Looped BFS": [named("looped_bfs", 4, LOOPS).on(LOOPS)],
    "Zero bubble": [named("zero_bubble", 4, range(3)).on(range(3))],
    "Interleaved zero bubble": [named("interleaved_zero_bubble", 4, LOOPS).on(LOOPS)],
    "ZB-V": [named("zbv", 3, V).on(V)],
    "DualPipeV": [named("dualpipev", 4, V).on(V)],
}


def drawn(worker_steps: WorkerSteps) -> str:
    """A cell for each step where it runs, if all take one tick."""
    spans = replay(worker_steps)
    lines = [["."] * int(max(span.end for span in spans.values())) for _ in worker_steps]
    alone = all(step.stage == worker for worker, steps in enumerate(worker_steps) for step in steps)
    for line, steps in zip(lines, worker_steps, strict=True):
        for step in steps:
            line[int(spans[step].start)] = str(step.action if alone else step)
    width = max(len(cell) for line in lines for cell in line)
    return "\n".join(" ".join(cell.ljust(width) for cell in line).rstrip() for line in lines)


def test_each_schedule_is_drawn_as_it_is():
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {section.split("\n")[0]: re.findall(r"```text\n(.*?)\n```", section, re.DOTALL) for section in sections}
    assert {title: blocks for title, blocks in found.items() if blocks} == {
        title: [drawn(worker_steps) for worker_steps in step_lists] for title, step_lists in DRAWN.items()
    }
