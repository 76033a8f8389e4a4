"""How the work grows, counted in lines run: seconds depend on the machine."""

from random import Random

import pytest

from blockpartition import partition, place, verify

from .cases import cases
from .counting import steps

pytestmark = pytest.mark.timeout(120)


def drawn(n: int, limit: int) -> list[int]:
    random = Random(n + limit)
    return [random.randrange(1, limit) for _ in range(n)]


@cases("constraints", [{}, {"transfer": 300}, {"transfer": 300, "overlap": True}, {"memory": 1000}])
def test_placements_and_their_proofs_grow_with_layers_and_stages_not_with_their_product(constraints):
    counts = []
    for n, k in ((500, 20), (4000, 160)):
        call = {name: drawn(n, value) if value is not True else True for name, value in constraints.items()}
        costs = drawn(n, 1000)
        found = place(costs, k, **call)
        counts.append((steps(place, costs, k, **call), steps(verify, found, costs, k, **call)))
    (placing, proving), (more_placing, more_proving) = counts
    assert more_placing < 8 * 2 * placing
    assert more_proving < 8 * 2 * proving


def test_the_proof_of_a_makespan_looks_at_each_position_a_few_times_for_each_stage_and_bound():
    n, k = 200, 6
    costs, call = drawn(n, 1000), {"transfer": drawn(n, 300), "microbatches": 8, "objective": "makespan"}
    found = place(costs, k, **call)
    assert steps(verify, found, costs, k, **call) < 40 * n * k * len(found.witness)


def test_the_most_even_partition_is_looked_for_near_the_string():
    """Also where one heavy layer leaves a wide choice of ends to all others."""
    n = 2000
    assert steps(partition, [*drawn(n, 1000), 100_000], 100, even="exact") < 100 * n
