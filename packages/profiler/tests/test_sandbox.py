import torch
from hypothesis import given
from torch import nn

from microbatch import Batch
from profiler import detach, layerwise_sandbox

from .strategies import models


@given(models())
def test_copies_train_on_the_device_and_share_nothing(model):
    model.eval()
    for layer, copy in zip(model, layerwise_sandbox(model, "cpu"), strict=True):
        assert all(child.training for child in copy.modules())
        assert not any(child.training for child in layer.modules())
        assert type(copy) is type(layer)
        for x, y in zip(layer.state_dict().values(), copy.state_dict().values(), strict=True):
            assert torch.equal(x, y)
            assert x.data_ptr() != y.data_ptr()


def test_one_copy_exists_at_a_time():
    copied = []

    class Counting(nn.Module):
        def __deepcopy__(self, memo):
            copied.append(self)
            return Counting()

    sandbox = layerwise_sandbox(nn.Sequential(Counting(), Counting()), torch.device("cpu"))
    assert copied == []
    next(sandbox)
    assert len(copied) == 1


def test_detach_cuts_the_graph_and_keeps_who_requires_grad():
    x = torch.rand(3, requires_grad=True)
    batch = Batch((x * 2, torch.rand(3), torch.arange(3)))
    before = [y.clone() for y in batch]
    detach(batch)
    assert [y.requires_grad for y in batch] == [True, False, False]
    assert all(y.is_leaf for y in batch)
    assert all(torch.equal(y, z) for y, z in zip(batch, before, strict=True))
    batch[0].sum().backward()
    assert x.grad is None
