import pytest
import torch
from torch import nn

from profiler import profile, profile_sizes, profile_times


# The compiler looks at tensors in a way that PyTorch itself warns about.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_layers_are_timed_compiled_counted_as_written_and_stay_compiled():
    graphs, runs = [], []

    def backend(graph, inputs):
        graphs.append(graph)

        def run(*args):
            runs.append(len(graphs))
            return graph.forward(*args)

        return run

    plain = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    model = nn.Sequential(plain[0], torch.compile(plain[1], backend=backend))
    sample = torch.rand(4, 6)
    model(sample)
    profile_times(model, sample, 1e-6, "cpu")
    timed = len(runs)
    assert timed > 1
    assert profile_sizes(model, sample, 1, 2.0, "cpu") == profile_sizes(plain, sample, 1, 2.0, "cpu")
    assert profile_sizes(model, sample, 1, 2.0, "meta") == profile_sizes(plain, sample, 1, 2.0, "meta")
    assert profile(model, sample, device="meta").costs("flops") == profile(plain, sample, device="meta").costs("flops")
    assert len(runs) == timed
    model(sample)
    assert len(runs) == timed + 1
