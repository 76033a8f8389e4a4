from hypothesis import given
from hypothesis import strategies as st

from blockpartition._guesses import Guesses


def search(over, blocks, noise, low, high):
    """As the solver does, on a function of the bound that rises by at most `blocks`; the bounds tried."""
    guesses, tried = Guesses(blocks, noise, high - low), []
    bound = low + (high - low) // 3
    while low < high:
        bound = min(max(bound, low), high - 1)
        tried.append(bound)
        rest = over(bound)
        low, high = (low, bound) if rest >= 0 else (bound + 1, high)
        bound = guesses.next(bound, rest, low, high)
    return high, tried


@given(st.integers(1, 10**6), st.integers(0, 10**9), st.integers(0, 10**12), st.integers(1, 10**12), st.integers(1, 5))
def test_the_search_ends_where_nothing_is_lacking_and_soon(blocks, noise, least, width, power):
    """On lines, and on curves that are flat or steep there."""

    def over(bound):
        distance = bound - least
        return blocks * (distance if distance < 0 else distance**power)

    low, high = max(0, least - width), least + width
    found, tried = search(over, blocks, noise, low, high)
    assert found == least
    assert len(tried) <= 6 * width.bit_length() + 12
