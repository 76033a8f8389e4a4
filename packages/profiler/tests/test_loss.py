"""The loss is profiled as a layer behind the last."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from profiler import profile

MODEL = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
X, Y = torch.rand(8, 6), torch.randint(5, (8,))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("chunks", [1, 4])
def test_bytes_of_cross_entropy(device, chunks):
    found = profile(MODEL, X, device=device, chunks=chunks, loss_fn=F.cross_entropy, target=Y, timeout=1e-6)
    rows = 8 // chunks
    assert found.names == ["0", "1"]
    assert (found.loss.kind, found.loss.parameter_bytes, found.loss.buffer_bytes) == ("cross_entropy", 0, 0)
    assert found.loss.output_bytes == 4
    # Logarithms of the probabilities are saved, the loss itself is alive, and nll keeps its sum of weights.
    assert found.loss.saved_bytes == rows * 5 * 4 + 4 + 4
    assert found.loss.peak_bytes >= found.loss.saved_bytes
    assert (found.loss.seconds is None) == (device == "meta")


@pytest.mark.parametrize("rest", [(), ({"hits": 1},)])
def test_module_loss_and_counting_loss(rest):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, output, target):
            assert torch.equal(target["mask"], Y > 1)
            found = (output * self.weight).square().sum(), target["mask"].sum()
            return (found, *rest) if rest else found

    found = profile(MODEL, X, device="cpu", loss_fn=Head(), target={"mask": Y > 1}, timeout=1e-6)
    assert (found.loss.kind, found.loss.trainable_bytes) == ("Head", 5 * 4)


@pytest.mark.parametrize("given", [{"chunks": 2}, {"rows": [4]}])
@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        (3, TypeError, "^target is of type int"),
        ({"y": Y, "names": ["a"]}, TypeError, r"^target\['names'\]\[0\] is of type str"),
        (torch.tensor(1.0), ValueError, "^target has shape"),
    ],
)
def test_a_target_that_cannot_be_cut_is_named(given, target, error, message):
    with pytest.raises(error, match=message):
        profile(MODEL, X, device="meta", loss_fn=F.cross_entropy, target=target, **given)


def test_too_few_rows_are_those_of_the_target():
    with pytest.raises(ValueError, match="rows: expected at most 3, the number of rows of the target, got 4"):
        profile(MODEL, X, device="meta", loss_fn=F.cross_entropy, target=Y[:3], rows=[4])
