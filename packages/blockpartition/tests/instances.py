"""Small problems by the thousand, drawn from the numbers that break solvers; quicker than hypothesis draws them."""

from fractions import Fraction
from random import Random

from blockpartition import Mode, Stage

from .strategies import Placing

NUMBERS = [
    lambda random: random.randrange(4),  # ties and zeros
    lambda random: random.randrange(100),
    lambda random: 10 ** random.randrange(5),  # heavy tails
    lambda random: random.getrandbits(66),
    lambda random: random.random(),
    lambda random: random.choice([0.0, 5e-324, 2.5e-310, 0.1, 0.2, 0.3, 1e16, 1.7976931348623157e308]),
    lambda random: Fraction(random.randrange(9), random.randrange(1, 9)),
]
SMALL = NUMBERS[:2] + NUMBERS[-1:]


def problem(random: Random) -> tuple[list, int]:
    """Costs and a number of blocks."""
    n = random.randrange(1, 10)
    return _vector(random, n, random.choice(NUMBERS)), random.randrange(1, n + 1)


def placing(random: Random, max_layers: int) -> Placing:
    """A call of `place` with about half of all constraints."""
    n = random.randrange(1, max_layers + 1)
    k = random.randrange(1, min(n, 4) + 1)
    small = random.choice(SMALL)
    forbid = [cut for cut in range(1, n) if random.random() < 0.1]
    constraints = {
        "memory": random.choice([None, _vector(random, n, small)]),
        "activations": random.choice([None, _vector(random, n, random.choice(SMALL))]),
        "in_flight": random.choice([None, "1f1b", "fill_drain", [random.randrange(4) for _ in range(k)]]),
        "transfer": random.choice([None, _vector(random, random.choice([n, n - 1]), small)]),
        "forbid": forbid,
        "pin": [cut for cut in range(1, n) if random.random() < 0.1 and cut not in forbid],
        "microbatches": random.randrange(1, 6),
    }
    return Placing(_vector(random, n, random.choice([small, *NUMBERS])), _stages(random, k), constraints)


def _vector(random: Random, size: int, draw) -> list:
    return [draw(random) for _ in range(size)]


def _stages(random: Random, k: int) -> list[Stage]:
    speeds = random.choice([[1], [1, 2], [Fraction(1, 3), 1, 5], [0.5, 1.5]])
    tight = random.random() < 0.5
    modes = random.choice([lambda: (), lambda: _modes(random)])
    return [
        Stage(random.choice(speeds), random.randrange(60) if tight else random.choice([None, 90]), modes())
        for _ in range(k)
    ]


def _modes(random: Random) -> list[Mode]:
    """No modes, or up to three."""
    times, own = [1, 1.5, Fraction(4, 3)], [0, 1, 1, Fraction(1, 2), 0.25]
    names = "abc"[: random.randrange(4)]
    return [Mode(name, random.choice(times), random.choice(own), random.choice(own)) for name in names]
