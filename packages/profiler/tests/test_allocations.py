import threading

import torch

from profiler import AllocationTracker


def test_counts_what_python_or_the_graph_keeps_alive():
    x = torch.rand(10, requires_grad=True)
    births = AllocationTracker()
    with births:
        kept_by_the_graph = x.exp().sum()  # exp keeps its result
        kept_by_python = torch.zeros(3)
        torch.ones(1000)
    assert births.alive() == 4 * (10 + 1 + 3)
    assert births.peak == 4 * (10 + 1 + 3 + 1000)
    kept_by_the_graph.backward()
    del kept_by_python
    assert births.alive() == 4


def test_views_in_place_results_and_inputs_are_nothing_new():
    x = torch.rand(4, 3)
    births = AllocationTracker()
    with births:
        outputs = x.t(), x[1:], x.add_(1), x.detach(), x.unflatten(1, (1, 3)), torch.relu_(x)
    assert len(outputs) == 6
    assert births.alive() == 0
    assert births.peak == 0


def test_a_reused_address_is_a_new_storage():
    births = AllocationTracker()
    with births:
        for _ in range(50):
            x = torch.empty(1000)
            del x
        y = torch.empty(1000)
    assert births.alive() == 4 * len(y)
    assert births.peak == 4 * len(y)


def test_storages_may_die_on_another_thread_while_they_are_counted(monkeypatch):
    """As activations do that one stage of a pipeline made and another, or the caller, lets go."""

    def interrupted(storage):
        thread = threading.Thread(target=dying.clear)
        thread.start()
        thread.join(300)
        return nbytes(storage)

    births, nbytes = AllocationTracker(), torch.UntypedStorage.nbytes
    with births:
        kept, dying = torch.ones(3), [torch.ones(5) for _ in range(10)]
        monkeypatch.setattr(torch.UntypedStorage, "nbytes", interrupted)
        assert births.alive() >= 4 * len(kept)
        assert births.alive() == 4 * len(kept)
        more = torch.ones(1000)
    assert births.peak == 4 * (len(kept) + len(more))
