"""Detect tensors that a block and the model pass to each other in attributes of blocks, instead of in a call.

Such a tensor belongs to the micro-batch whose forward set it last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn

from ..checkpoint._state import last_entry
from ..values._leaves import get_tensors


class _Entry(NamedTuple):
    """A tensor in an attribute.

    Attributes:
        name: the name of the attribute.
        owner: the micro-batch whose call of the block has also returned the tensor, if any.
    """

    tensor: ref[Tensor]
    name: str
    owner: int | None = None


_Found = dict[int, _Entry]
"""Maps the id of a tensor to its entry."""


class Left:
    """The tensors that blocks of a model have left in attributes in one run, for all micro-batches."""

    def __init__(self) -> None:
        self._leaves: dict[nn.Module, bool] = {}
        self._found: _Found = {}
        self._before: _Found = {}
        self._in_call: dict[nn.Module, tuple[Callable[[], _Found], int]] = {}

    def begin(self, blocks: Mapping[str, nn.Module]) -> None:
        """Note the tensors in attributes of ``blocks`` before the run."""
        for name, block in blocks.items():
            self._before.update(_find_tensors(name, block))

    def watch(
        self, name: str, block: nn.Module, microbatch: int, arguments: Any, is_of_model: Callable[[Tensor], bool]
    ) -> Callable[[Any], None]:
        """Inspect ``block`` before its call with ``arguments``. Return a function to call with its output afterwards.

        Raises:
            RuntimeError: the forward of the model has set an attribute of the block to a tensor.
        """
        if not self._leaves.get(block, True):  # its first call has left nothing
            return lambda output: None
        before = _find_tensors(name, block)
        if block not in self._leaves:
            self._expect_none_set(before, is_of_model)
        given = {*map(id, get_tensors(arguments))}
        if block in self._leaves:  # an earlier micro-batch may read at any time what this call leaves
            self._in_call[block] = lambda: _set_since(before, given, name, block), microbatch

        def look(output: Any) -> None:
            returned = {*map(id, get_tensors(output))}
            for key in returned & before.keys():  # this call has returned a tensor that an earlier one left
                self._found.pop(key, None)
            left = {
                key: each._replace(owner=microbatch if key in returned else None)
                for key, each in _set_since(before, given, name, block).items()
            }
            self._leaves[block] = bool(left) or self._leaves.get(block, False)
            self._found.update(left)
            self._in_call.pop(block, None)

        return look

    def expect_not(self, tensor: Tensor, model: nn.Module, microbatch: int) -> None:
        """Raise RuntimeError if ``tensor``, which ``model`` itself uses for ``microbatch``, was left by a block."""
        found = self._found.get(id(tensor)) or self._set_in_call(tensor, microbatch)
        if found is not None and found.tensor() is tensor and found.owner != microbatch:
            raise RuntimeError(
                f"{type(model).__name__} reads {found.name}, where a block has left a tensor; by the time of the "
                "read, the block may have stored a different micro-batch's tensor there; let the block return it"
            )

    def _set_in_call(self, tensor: Tensor, microbatch: int) -> _Entry | None:
        """Return the attribute in which a block that now computes a different micro-batch has left ``tensor``."""
        for set_since, owner in list(self._in_call.values()):
            if owner != microbatch and (found := set_since().get(id(tensor))) is not None:
                return found
        return None

    def _expect_none_set(self, now: _Found, is_of_model: Callable[[Tensor], bool]) -> None:
        """Raise RuntimeError if a tensor of ``now`` was set in this run, and not by a block."""
        for key, each in now.items():
            tensor, then = each.tensor(), self._before.get(key)
            was_there = then is not None and then.tensor() is tensor
            if tensor is not None and not was_there and key not in self._found and not is_of_model(tensor):
                raise RuntimeError(
                    f"the model sets {each.name}, an attribute of a block, to a tensor; by the time of the call, the "
                    "forward of a different micro-batch may have set it again; call the block with it"
                )


def _set_since(before: _Found, given: set[int], name: str, block: nn.Module) -> _Found:
    """Return the tensors in attributes of ``block`` that were neither there ``before`` its call nor ``given`` to it."""
    return {key: each for key, each in _find_tensors(name, block).items() if key not in before and key not in given}


def _find_tensors(name: str, block: nn.Module) -> _Found:
    """Return the tensors in attributes of ``block``, or at the end of lists in attributes."""
    found: _Found = {}
    for path, module in block.named_modules(prefix=name):
        if not type(module).__module__.startswith("torch.nn."):
            for attribute, value in list(vars(module).items()):  # another thread may set one
                last = last_entry(value)
                if isinstance(last, Tensor):
                    found[id(last)] = _Entry(ref(last), f"{path}.{attribute}")
    return found
