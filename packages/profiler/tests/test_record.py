import numpy as np
import pytest
from hypothesis import given

from profiler import LayerProfile, Profile

from .records import profiles


@given(profiles())
def test_a_profile_is_a_sequence_with_names(profile):
    assert len(profile) == len(list(profile)) == len(profile.names)
    for i, layer in enumerate(profile):
        assert profile[i] is profile[layer.name] is profile[np.int64(i)] is layer


def test_an_unknown_name_is_told():
    with pytest.raises(KeyError, match="no layer 'nowhere'"):
        _example()["nowhere"]


def _example():
    layer = LayerProfile("a", "Linear", None, None, 4, 0, 0, 8, 8, 16, 2)
    return Profile((layer,), "meta", "2.13", 1, 1, 1, 0)


def test_what_was_not_measured_is_no_cost():
    with pytest.raises(ValueError, match="no seconds, because it was measured on device 'meta'"):
        _example().costs("seconds")
    with pytest.raises(ValueError, match=r"by: expected one of seconds, parameter_bytes, .* got 'weight'"):
        _example().costs("weight")
