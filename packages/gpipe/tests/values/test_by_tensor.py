"""A value belongs to one tensor, not to its contents or to a later tensor with the same id."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gpipe.values._by_tensor import ByTensor


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["set", "remove", "free"])), max_size=40))
def test_values_of_live_tensors_are_found(steps: list[tuple[int, str]]) -> None:
    tensors, found, expected = [torch.zeros(()) for _ in range(5)], ByTensor[int](), dict[int, int]()
    for number, (k, action) in enumerate(steps):
        if action == "set":
            found[tensors[k]] = expected[k] = number
        else:
            expected.pop(k, None)
            if action == "remove":
                found.remove(tensors[k])
            else:
                tensors[k] = torch.zeros(())  # often with the id of the freed one
                found.remove_freed()
        assert [found.get(tensor) for tensor in tensors] == [expected.get(j) for j in range(5)]
        assert [tensor in found for tensor in tensors] == [j in expected for j in range(5)]
    found.clear()
    assert not any(tensor in found for tensor in tensors)
