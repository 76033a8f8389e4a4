import torch
from torch import nn

from profiler import SkipStore
from profiler._skips import routed


def test_a_popped_tensor_is_cut_off_from_the_layer_that_stashed_it():
    store, x = SkipStore(), torch.rand(3, requires_grad=True)
    store["skip"] = x * 2
    store.detach()
    popped = store.pop("skip")
    assert popped.requires_grad
    popped.mul_(3).sum().backward()
    assert x.grad is None
    assert "skip" not in store


def test_inside_one_layer_the_graph_stays_whole():
    store, x = SkipStore(), torch.rand(3, requires_grad=True)
    store["skip"] = x * 2
    store.pop("skip").sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert store.stashed() == []


def test_stashed_are_those_of_the_current_layer_that_are_left():
    store, values = SkipStore(), [torch.rand(1) for _ in range(3)]
    store["before"] = values[0]
    store.detach()
    store["mine"], store["inside"], store["nothing"] = values[1], values[2], None
    store.pop("inside")
    assert [value is values[1] for value in store.stashed()] == [True]
    assert store.pop("nothing") is None


def test_every_module_inside_a_layer_is_routed_and_put_back():
    used = []

    class Routed(nn.Module):
        def route_skips(self, store):
            class Route:
                def __enter__(self):
                    used.append(store)

                def __exit__(self, *error):
                    used.remove(store)

            return Route()

    store = SkipStore()
    with routed(nn.Sequential(Routed(), nn.Sequential(Routed())), store):
        assert len(used) == 2
        assert all(each is store for each in used)
    assert used == []
