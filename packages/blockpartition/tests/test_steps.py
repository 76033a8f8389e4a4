"""How the work grows, counted in lines run: seconds depend on the machine."""

from random import Random

from blockpartition import partition, place, verify

from .cases import cases
from .counting import steps


def drawn(n: int, limit: int) -> list[int]:
    random = Random(n + limit)
    return [random.randrange(1, limit) for _ in range(n)]


@cases("constraints", [{}, {"transfer": 300}, {"memory": 1000}])
def test_placements_grow_with_layers_and_stages_not_with_their_product(constraints):
    counts = []
    for n, k in ((500, 20), (4000, 160)):
        call = {name: drawn(n, value) for name, value in constraints.items()}
        counts.append(steps(place, drawn(n, 1000), k, **call))
    assert counts[1] < 8 * 2 * counts[0]


def test_a_makespan_is_verified_by_a_few_looks_at_each_pair_of_positions_for_each_stage():
    n, k = 200, 6
    costs, call = drawn(n, 1000), {"transfer": drawn(n, 300), "microbatches": 8, "objective": "makespan"}
    found = place(costs, k, **call)
    assert steps(verify, found, costs, k, **call) < 2 * n * n * k


GROWTHS = {
    "convex": lambda n: [i * i for i in range(n)] + [10**15],
    "convex, falling": lambda n: [10**15] + [i * i for i in range(n, 0, -1)],
    "doubling": lambda n: [2**i for i in range(n)],
    "one in front": lambda n: [10**15] + [1] * n,
    "equal": lambda n: [7] * n,
    "valley": lambda n: [(i - n // 2) ** 2 for i in range(n)],
    "floats": lambda n: [Random(n + i).random() for i in range(n)],
    "sawtooth": lambda n: [i % 17 * 1000 + i for i in range(n)],
}


@cases("growth", list(GROWTHS))
@cases("share", [2, 3, 10])
def test_eight_times_as_many_layers_and_blocks_take_about_eight_times_as_many_steps(growth, share):
    """Lines run, not seconds. A search may take a few passes more or less: so of several sizes together."""
    costs = GROWTHS[growth]
    few, many = (sum(steps(partition, costs(n), n // share) for n in (m, m + m // 4)) for m in (300, 2400))
    assert many < 8 * 1.6 * few
