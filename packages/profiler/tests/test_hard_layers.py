import pytest

from profiler import profile, profile_sizes, profile_times

from .hard_layers import HARD, SIZED_BY_VALUES


@pytest.fixture(params=HARD, ids=str)
def hard(request):
    return HARD[request.param]()


def test_every_layer_gets_its_figures(hard):
    model, sample = hard
    found = profile(model, sample, device="cpu", timeout=1e-6)
    assert found.names == [name for name, _ in model.named_children()]
    assert all(layer.forward_seconds > 0 for layer in found)
    assert len(profile_times(model, sample, 1e-6, "cpu")) == len(model)
    assert len(profile_sizes(model, sample, 2, 2.0, "cpu")) == len(model)


@pytest.mark.parametrize("name", sorted(SIZED_BY_VALUES))
def test_bytes_that_depend_on_values_are_refused_by_name(name):
    with pytest.raises(ValueError, match=r"of layout torch\.sparse_coo depend on its values.*use device='cpu'"):
        profile(*HARD[name](), device="meta")


@pytest.mark.parametrize("name", sorted(HARD.keys() - SIZED_BY_VALUES))
def test_fake_tensors_agree_with_real_ones(name):
    model, sample = HARD[name]()
    real = profile(model, sample, device="cpu", timeout=1e-6)
    fake = profile(model, sample, device="meta")
    for by in ("saved_bytes", "output_bytes", "parameter_bytes", "buffer_bytes", "flops"):
        assert fake.costs(by) == real.costs(by), by


def test_a_backward_goes_through_the_skip_too():
    model, sample = HARD["skip without gradient"]()
    without = profile(model, sample, device="cpu", timeout=1e-6)
    assert [layer.backward_seconds > 0 for layer in without] == [False, False, False]
    found = profile(model, sample.requires_grad_(), device="cpu", timeout=1e-6)
    assert all(layer.backward_seconds > 0 for layer in found)
    rows = 4 * 6 * 4
    # What is stashed is alive after the forward; what is popped was born elsewhere.
    assert found["0"].saved_bytes == 2 * rows
    assert found["2"].saved_bytes == rows
