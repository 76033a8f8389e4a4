"""Balances with the lowest peak, beside all others counted by hand."""

from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpipe.balance._cuts import Cuts
from gpipe.balance._peak import MODES, LayerBytes, least_peak


def peaks(sizes, memory, activations, boundary, held, recomputes):
    """Bytes of each stage, counted by hand."""
    ends = [0, *accumulate(sizes)]
    found = []
    for j, (start, end) in enumerate(pairwise(ends)):
        whole, entering = sum(activations[start:end]), boundary[start]
        kept = held[j] * entering + whole if recomputes else held[j] * whole
        found.append(sum(memory[start:end]) + kept)
    return found


@given(st.data())
def test_no_balance_has_a_lower_peak_under_the_schedule(data):
    layers = data.draw(st.integers(1, 7))
    k = data.draw(st.integers(1, min(3, layers)))
    numbers = st.lists(st.integers(0, 20), min_size=layers, max_size=layers)
    memory, activations, boundary = data.draw(numbers), data.draw(numbers), data.draw(numbers)
    held = data.draw(st.lists(st.integers(1, 4), min_size=k, max_size=k))
    recomputes = data.draw(st.booleans())
    mode = MODES["always" if recomputes else "never"]
    found = least_peak(LayerBytes(memory, activations, boundary), held, mode, Cuts([], []))
    every = [[b - a for a, b in pairwise([0, *cuts, layers])] for cuts in combinations(range(1, layers), k - 1)]
    arguments = memory, activations, boundary, held, recomputes
    assert max(peaks(found, *arguments)) == min(max(peaks(sizes, *arguments)) for sizes in every)
