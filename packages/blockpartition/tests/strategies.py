"""Valid problems: the small ones an oracle can answer, with the numbers that break solvers."""

from fractions import Fraction

from hypothesis import strategies as st

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


def costs(min_size: int = 1, max_size: int = MAX_LAYERS) -> st.SearchStrategy[list]:
    """Lists of one kind of number, and now and then of all kinds."""
    kinds = [INTS, FLOATS, FRACTIONS, INTS | FLOATS | FRACTIONS]
    return st.one_of([st.lists(kind, min_size=min_size, max_size=max_size) for kind in kinds])


@st.composite
def problems(draw: st.DrawFn, min_size: int = 1, max_size: int = MAX_LAYERS) -> tuple[list, int]:
    """Costs and a number of blocks they can fill."""
    layers = draw(costs(min_size, max_size))
    return layers, draw(st.integers(1, len(layers)))


def exact(numbers: list) -> list[Fraction]:
    return [Fraction(x) for x in numbers]
