import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler import LayerProfile, Profile

from .records import layers, profiles


@given(profiles())
def test_a_profile_is_a_sequence_with_names(profile):
    assert len(profile) == len(list(profile)) == len(profile.names)
    for i, layer in enumerate(profile):
        assert profile[i] is profile[layer.name] is profile[np.int64(i)] is layer
    assert profile[1:] == profile.layers[1:]


@given(layers(timed=True))
def test_both_parts_of_a_backward_are_all_of_it_or_more(layer):
    if layer.backward_input_seconds is None:
        assert layer.backward_weight_seconds is None
    else:
        assert layer.backward_weight_seconds == max(0.0, layer.backward_seconds - layer.backward_input_seconds)


def test_figures_that_are_not_given_are_nothing():
    layer = _example()[0]
    assert layer.passing_bytes == layer.freed_bytes == 0
    assert layer.backward_peak_bytes is layer.parting_bytes is None


def test_an_unknown_name_is_told():
    with pytest.raises(KeyError, match="no layer 'nowhere'"):
        _example()["nowhere"]


def _example():
    layer = LayerProfile("a", "Linear", None, None, 4, 0, 0, 8, 8, 16, 2)
    return Profile((layer,), "meta", "2.13", 1, 1, 1, 0)


@given(profiles(timed=st.just(True)))
def test_seconds_are_forward_plus_backward(profile):
    assert profile.seconds == [x.forward_seconds + x.backward_seconds for x in profile]


def test_what_was_not_measured_is_no_cost():
    with pytest.raises(ValueError, match="no seconds, as it was made on device 'meta'"):
        _example().costs("seconds")
    with pytest.raises(ValueError, match=r"by: expected one of seconds, parameter_bytes, .* got 'weight'"):
        _example().costs("weight")


@given(layers(timed=False))
def test_parameters_are_trainable_or_frozen(layer):
    assert layer.parameter_bytes == layer.trainable_bytes + layer.frozen_bytes
    assert layer.seconds is None
