"""Values between layers that are dataclasses or mappings nobody registered with torch: as good as tuples."""

from collections import UserDict
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from profiler import Profile, profile

BYTES = ("saved_bytes", "output_bytes", "peak_bytes", "parameter_bytes", "flops")


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


KINDS = {
    "tuple": (lambda x, y: (x, y), lambda pair: pair),
    "dataclass": (Pair, lambda pair: (pair.left, pair.right)),
    "mapping": (lambda x, y: UserDict(left=x, right=y), lambda pair: (pair["left"], pair["right"])),
    "nested": (lambda x, y: {"pair": Pair(x, [y])}, lambda value: (value["pair"].left, value["pair"].right[0])),
}


class OnPairs(nn.Module):
    """Changes one half in place, as a layer may, and computes the other."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(3, 3)

    def forward(self, value):
        make, take = KINDS[self.kind]
        left, right = take(value)
        return make(left.relu_(), self.linear(right))


class Join(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, value):
        left, right = KINDS[self.kind][1](value)
        return left + right


def model_and_sample(kind: str, depth: int, rows: int) -> tuple[nn.Sequential, object]:
    torch.manual_seed(depth)
    layers = [OnPairs(kind) for _ in range(depth)]
    return nn.Sequential(*layers, Join(kind)), KINDS[kind][0](torch.randn(rows, 3), torch.randn(rows, 3))


@given(st.sampled_from(sorted(KINDS.keys() - {"tuple"})), st.integers(1, 3), st.integers(4, 8), st.booleans())
def test_they_cost_what_tuples_cost(kind, depth, rows, fake):
    def found(kind: str) -> Profile:
        return profile(*model_and_sample(kind, depth, rows), device="meta" if fake else "cpu", chunks=2, timeout=1e-6)

    ours, theirs = found(kind), found("tuple")
    for by in BYTES:
        assert ours.costs(by) == theirs.costs(by), by
