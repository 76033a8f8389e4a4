"""Alternatives for each stage: what a mode costs, and which is chosen. That it is the best, `test_place` shows."""

from fractions import Fraction
from random import Random

import pytest

from blockpartition import Mode, Stage, place, verify

from .cases import cases

KEEP = Mode("keep")
RECOMPUTE = Mode("recompute", time=Fraction(4, 3), saved=0.25, transient=1)


def test_only_stages_short_of_memory_recompute():
    """1F1B: the first stage holds four micro-batches, the last one."""
    stages = [Stage(capacity=10, modes=[KEEP, RECOMPUTE])] * 4
    found = place([3] * 8, stages, activations=[2] * 8, in_flight="1f1b")
    assert (found.sizes, found.modes) == ((2, 2, 2, 2), ("recompute", "recompute", "keep", "keep"))
    assert found.times == (8, 8, 6, 6)
    verify(found, [3] * 8, stages, activations=[2] * 8, in_flight="1f1b")


def test_of_two_modes_as_good_the_earlier_is_chosen():
    for modes in ([Mode("a"), Mode("b")], [Mode("b"), Mode("a")]):
        assert place([1, 1], [Stage(modes=modes)] * 2).modes == (modes[0].name,) * 2


@cases("objective", ["bottleneck", "makespan"])
def test_large_placements_with_modes_prove_themselves(objective):
    random = Random(3)
    n, k = (80, 6) if objective == "makespan" else (200, 16)
    costs, memory, kept = ([random.randrange(1, 100) for _ in range(n)] for _ in range(3))
    room = (sum(memory) + 3 * sum(kept)) // k
    stages = [Stage(random.choice([1, 2]), room, [KEEP, Mode("half", 1.2, 0.5), RECOMPUTE]) for _ in range(k)]
    call = {"memory": memory, "activations": kept, "in_flight": "1f1b", "microbatches": 8}
    found = place(costs, stages, **call, objective=objective, gap=0.05)
    assert len(set(found.modes)) > 1
    verify(found, costs, stages, **call, objective=objective, gap=0.05)


def test_impossible_modes_are_named():
    with pytest.raises(TypeError, match=r"^modes\[1\] must be a Mode, got 'b' of type str$"):
        Stage(modes=[KEEP, "b"])
    with pytest.raises(ValueError, match=r"^a stage's modes must have different names"):
        Stage(modes=[KEEP, Mode("keep", 2)])
    with pytest.raises(ValueError, match=r"^time of mode 'a' of stage\[0\] must be positive, got 0$"):
        place([1, 2], [Stage(modes=[Mode("a", 0)])])
