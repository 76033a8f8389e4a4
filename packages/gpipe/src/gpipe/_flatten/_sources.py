"""Follow what tensors are made of, through all operations."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from streams import DispatchMode

from ..values._leaves import storage_id, tensors_of


class Sources(DispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, it notes for each tensor which sources it was computed from.

    Tensors that share memory share their sources. A source is any object that can be hashed.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        # The tensors are held, or their memory would be given out again, with its identity.
        self._known: dict[int, tuple[Tensor, frozenset[Any]]] = {}

    def of(self, value: Any) -> frozenset[Any]:
        return frozenset().union(*(self._of(tensor) for tensor in tensors_of(value)))

    def _of(self, tensor: Tensor) -> frozenset[Any]:
        return self._known.get(storage_id(tensor), (tensor, frozenset()))[1]

    def add(self, value: Any, sources: frozenset[Any]) -> None:
        for tensor in tensors_of(value):
            held, known = self._known.get(storage_id(tensor), (tensor, frozenset()))
            self._known[storage_id(tensor)] = held, known | sources

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sources = self.of((args, kwargs))
        args, kwargs = self.prepared(args, kwargs or {})
        result = func(*args, **kwargs)
        if sources and not looks_at_shapes(func):
            self.add(result, sources)
        return result

    def prepared(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments that an operation is called with in place of these."""
        return args, kwargs


def is_whole(tensor: Tensor) -> bool:
    """Whether it has all elements of its memory."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def looks_at_shapes(func: Any) -> bool:
    """Whether the values of the result are not those of an argument."""
    name: str = func.__name__.partition(".")[0]
    return name.startswith("new_") or name.endswith("_like")
