"""Small valid problems that an oracle can solve, with numbers that break solvers."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

from blockpartition import Infeasible, Mode, Placement, Stage, place

MAX_LAYERS = 9

INTS = st.one_of(
    st.integers(0, 3),  # ties and zeros
    st.integers(0, 100),
    st.integers(0, 4).map(lambda e: 10**e),  # heavy tails
    st.integers(2**62, 2**66),
)
FLOATS = st.one_of(
    st.floats(0, 1),
    st.sampled_from([0.0, -0.0, 5e-324, 2.2250738585072014e-308, 0.1, 0.2, 0.3, 1e16, 1.7976931348623157e308]),
    st.floats(0, allow_nan=False, allow_infinity=False),
)
FRACTIONS = st.fractions(0, 10, max_denominator=12)
SMALL = st.one_of(st.integers(0, 3), st.integers(0, 30), FRACTIONS)


def costs(min_size: int = 1, max_size: int = MAX_LAYERS) -> st.SearchStrategy[list]:
    """Lists of one kind of number, and now and then of all kinds."""
    kinds = [INTS, FLOATS, FRACTIONS, INTS | FLOATS | FRACTIONS]
    return st.one_of([st.lists(kind, min_size=min_size, max_size=max_size) for kind in kinds])


# Possible values of a forged field.
ODDITIES = st.one_of(
    st.integers(-1, 9), st.floats(), st.fractions(), st.booleans(), st.none(), st.text(max_size=2), st.just(()),
    st.lists(st.integers(-1, 9) | st.none() | st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4).map(tuple),
)  # fmt: skip


@st.composite
def problems(draw: st.DrawFn, min_size: int = 1, max_size: int = MAX_LAYERS) -> tuple[list, int]:
    """Costs and a number of blocks they can fill."""
    layers = draw(costs(min_size, max_size))
    return layers, draw(st.integers(1, len(layers)))


@st.composite
def large_problems(draw: st.DrawFn) -> tuple[list, int]:
    """Hundreds of layers, where no oracle can go."""
    kind = draw(st.sampled_from([INTS, FLOATS, FRACTIONS]))
    few = draw(st.lists(kind, min_size=1, max_size=40))
    layers = few * draw(st.integers(1, 10))
    return layers, draw(st.integers(1, len(layers)))


@dataclass
class Placing:
    """The arguments of a call of `place`."""

    costs: list
    stages: list[Stage]
    constraints: dict[str, Any]

    def placed(self, **more: Any) -> Placement | None:
        """Return the result of `place` with updated arguments; None if infeasible."""
        try:
            return place(self.costs, self.stages, **{**self.constraints, **more})
        except Infeasible:
            return None


@st.composite
def placings(
    draw: st.DrawFn, max_layers: int = 7, max_stages: int = 4, modes: bool | None = None, **fixed: Any
) -> Placing:
    """Placements of every variety, often infeasible; `fixed` constraints are taken as they are."""
    n = draw(st.integers(1, max_layers))
    k = draw(st.integers(1, min(n, max_stages)))
    layers = draw(st.lists(draw(st.sampled_from([SMALL, SMALL, FLOATS])), min_size=n, max_size=n))
    forbid = draw(st.sets(st.integers(1, n - 1), max_size=2)) if n > 1 else set()
    microbatches = draw(st.integers(1, 6))
    constraints = {
        "memory": draw(st.none() | _vector(n)),
        "activations": draw(st.none() | _vector(n)),
        "in_flight": draw(
            st.sampled_from([None, "1f1b", "fill_drain"]) | st.lists(st.integers(0, 3), min_size=k, max_size=k)
        ),
        "transfer": draw(st.none() | _vector(n) | _vector(n - 1)),
        "forbid": sorted(forbid),
        "pin": sorted(draw(st.sets(st.integers(1, n - 1), max_size=2)) - forbid) if n > 1 else [],
        "microbatches": microbatches,
        **fixed,
    }
    with_modes = draw(st.booleans()) if modes is None else modes
    return Placing(layers, draw(st.lists(_stages(with_modes), min_size=k, max_size=k)), constraints)


def _vector(size: int) -> st.SearchStrategy[list]:
    return st.lists(SMALL, min_size=size, max_size=size)


def _stages(with_modes: bool) -> st.SearchStrategy[Stage]:
    speeds = st.sampled_from([1, 1, 2, Fraction(1, 3), 0.5, 1.5])
    capacities = st.none() | st.integers(0, 40) | st.sampled_from([0, 0.5, Fraction(20, 3), 100])
    modes = st.lists(_modes(), max_size=2, unique_by=lambda mode: mode.name) if with_modes else st.just(())
    return st.builds(Stage, speeds, capacities, modes)


def _modes() -> st.SearchStrategy[Mode]:
    factors = st.sampled_from([0, 1, 1, 2, 0.5, Fraction(1, 3)])
    return st.builds(Mode, st.sampled_from("abc"), st.sampled_from([1, 1.5, Fraction(4, 3), 2]), factors, factors)
