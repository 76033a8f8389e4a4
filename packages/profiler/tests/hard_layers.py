"""Models whose layers a profiler could trip over, each with a sample."""

import warnings
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .strategies import Call, join


def first(values: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return values[0]


class Skip(nn.Module):
    """Stashes or pops one tensor, by default on a shelf that all models share."""

    shelf: dict[str, torch.Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.store = self.shelf

    @contextmanager
    def route_skips(self, store: dict[str, torch.Tensor]) -> Iterator[None]:
        self.store = store
        yield
        self.store = self.shelf


class Stash(Skip):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.store["skip"] = y = x * 3
        return x + y.mean()


class Pop(Skip):
    """Changes in place what it pops."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.store.pop("skip").mul_(2)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inside, x, use_reentrant=False)  # type: ignore[no-any-return]


class Remembering(nn.Module):
    """Has a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.rand(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


class OnPairs(nn.Module):
    """Passes a dataclass inside a mapping not registered with torch, and modifies half of it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: UserDict[str, Pair]) -> UserDict[str, Pair]:
        pair = value["pair"]
        return UserDict(pair=Pair(pair.left.relu_(), self.linear(pair.right)))


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer: nn.Module = nn.utils.weight_norm(nn.Linear(6, 6))
    return layer


def _rows(requires_grad: bool = False) -> torch.Tensor:
    return torch.rand(4, 6, requires_grad=requires_grad)


class SparseBuffer(nn.Module):
    """A linear layer whose output a sparse buffer mixes."""

    def __init__(self, how: str, *blocks: tuple[int, int]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # compressed layouts are a beta feature
            self.register_buffer("mix", getattr(torch.eye(6), how)(*blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.mix @ self.linear(x).T).T


HARD = {
    "sparse buffer": lambda: (nn.Sequential(SparseBuffer("to_sparse")), _rows()),
    "sparse buffer by rows": lambda: (nn.Sequential(SparseBuffer("to_sparse_csr")), _rows()),
    "sparse buffer by columns": lambda: (nn.Sequential(SparseBuffer("to_sparse_csc")), _rows()),
    "in-place on a view": lambda: (nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True)), torch.rand(4, 2, 3)),
    "several inputs": lambda: (nn.Sequential(Call(join), nn.Linear(6, 6)), (_rows(), _rows(requires_grad=True))),
    "same tensor twice": lambda: (nn.Sequential(Call(join)), (_rows(),) * 2),
    "dataclasses": lambda: (nn.Sequential(OnPairs(), OnPairs()), UserDict(pair=Pair(_rows(), _rows()))),
    "dropout": lambda: (nn.Sequential(nn.Dropout(), nn.AlphaDropout()), _rows()),
    "sparse embedding": lambda: (nn.Sequential(nn.Embedding(9, 6, sparse=True)), torch.randint(9, (4, 3))),
    "lstm on strided rows": lambda: (
        nn.Sequential(nn.Dropout(), Call(lambda x: x.transpose(0, 1)), nn.LSTM(6, 5, batch_first=True), Call(first)),
        torch.rand(3, 4, 6),
    ),
    "sparse output": lambda: (
        nn.Sequential(nn.Linear(6, 6), Call(lambda x: x.to_sparse()), Call(lambda x: x.to_dense())),
        _rows(),
    ),
    "old weight norm": lambda: (nn.Sequential(_old_weight_norm(), nn.ReLU()), _rows()),
    "plain attribute": lambda: (nn.Sequential(Remembering(), nn.Linear(6, 6)), _rows(requires_grad=True)),
    "skip": lambda: (nn.Sequential(Stash(), nn.Linear(6, 6), Pop(), nn.Linear(6, 6)), _rows()),
    "skip without gradient": lambda: (nn.Sequential(Stash(), nn.ReLU(), Pop()), _rows()),
    "checkpoint": lambda: (nn.Sequential(nn.Linear(6, 6), Checkpointed()), _rows()),
    "attention": lambda: (
        nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)),
        torch.rand(4, 3, 6),
    ),
    "spectral norm": lambda: (nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))), _rows()),
    "complex": lambda: (nn.Sequential(nn.Linear(6, 6, dtype=torch.cfloat)), torch.rand(4, 6, dtype=torch.cfloat)),
}

# Their bytes cannot be known without a device.
SIZED_BY_VALUES = frozenset({"sparse output"})
