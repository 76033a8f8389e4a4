"""Each stage may have its own checkpointing mode. test_step.py compares the results."""

import copy
import pickle
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe import inline, record
from gpipe.schedule import checkpoint_stops

from ..layers import MODES, Call, linears, piped

modes = st.sampled_from(MODES)


@given(st.lists(modes, min_size=1, max_size=4), st.integers(0, 5))
def test_checkpoint_stops_of_modes(each: list[str], m: int):
    stops = {"never": 0, "except_last": len(range(m)[:-1]), "always": m, "offload": 0}
    assert checkpoint_stops(each, m, len(each)) == tuple(stops[mode] for mode in each)
    assert checkpoint_stops(each[0], m, len(each)) == (stops[each[0]],) * len(each)


def test_stages_save_by_their_own_modes():
    """Each of m micro-batches in flight saves three exponentials per stage, or recomputes them."""
    layers = nn.Sequential(*[nn.Sequential(Call(torch.exp), Call(torch.exp), Call(torch.exp)) for _ in range(3)])
    peaks = {}
    for each in product(("never", "always"), repeat=3):
        pipe = piped(layers, [1, 1, 1], chunks=6, checkpoint=list(each))
        with inline(), record(memory=True) as timeline:
            x = torch.zeros(6, 100, requires_grad=True)
            pipe.step(x, loss_fn=lambda y, _: y.sum(), reduction="sum", schedule="zero_bubble")
        peaks[each] = timeline.peak_bytes
    for each, found in peaks.items():
        for j in range(2):  # the last one holds a single micro-batch under 1F1B
            other = (*each[:j], "never" if each[j] == "always" else "always", *each[j + 1 :])
            assert (found[j] < peaks[other][j]) == (each[j] == "always")


def test_the_attribute_stays_as_it_was_given():
    pipe = piped(linears(), [2, 1], checkpoint=("always", "never"))
    assert "checkpoint=['always', 'never']" in repr(pipe)
    pipe.checkpoint.append("never")  # a copy
    for again in (pipe, copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert again.checkpoint == ["always", "never"]
    pipe.checkpoint = "never"
    with pytest.raises(ValueError, match="one mode per partition; got 3 for 2 partitions"):
        pipe.checkpoint = ["always"] * 3
    assert pipe.checkpoint == "never"
