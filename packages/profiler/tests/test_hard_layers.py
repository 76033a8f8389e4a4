import pytest

from profiler import profile, profile_sizes, profile_times

from .hard_layers import HARD, SIZED_BY_VALUES


@pytest.mark.parametrize("name", HARD)
def test_every_layer_gets_its_figures_and_fake_tensors_agree(name):
    model, sample = HARD[name]()
    real = profile(model, sample, device="cpu", timeout=1e-6)
    assert real.names == [name for name, _ in model.named_children()]
    assert all(layer.forward_seconds > 0 for layer in real)
    assert (
        len(profile_times(model, sample, 1e-6, "cpu")) == len(profile_sizes(model, sample, 2, 2.0, "cpu")) == len(model)
    )
    if name in SIZED_BY_VALUES:
        with pytest.raises(ValueError, match=r"of layout torch\.sparse_coo depend on its values.*use device='cpu'"):
            profile(model, sample, device="meta")
        return
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
