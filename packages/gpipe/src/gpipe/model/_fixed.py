"""Refuse operations between blocks that change a parameter, or a buffer of a block, while another stage may use it.

A forward may scale the weights of all its blocks, for example. The first micro-batch may do this for later stages,
because they have not begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from .._cached_property import cached_property
from ..values._leaves import storage_id


class Fixed:
    """The parameters of a model, and the buffers of its blocks, in one run.

    Args:
        model: the model.
        parts: the modules of each stage.
        blocks: the blocks of the model.
        accept: is called with a changed tensor, so that no other check of the run reports the change.
        is_host: whether parameters are on the host, so that stages compute with copies of them.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[nn.Module],
        blocks: Iterable[nn.Module],
        accept: Callable[[Tensor], None],
        *,
        is_host: bool,
    ) -> None:
        self._model, self._parts, self._blocks, self._accept, self._is_host = model, parts, blocks, accept, is_host

    def expect_free(self, tensor: Tensor, stage: int, microbatch: int) -> None:
        """Expect that no stage uses ``tensor``, which the forward has changed in the turn of ``stage``.

        Raises:
            RuntimeError: it shares its memory with a parameter or buffer that another stage may be using.
        """
        found = self._found.get(storage_id(tensor))
        if found is None or found[2] == {stage}:
            return
        name, own, stages = found
        self._accept(own)
        if min(stages) > stage and not microbatch and not self._is_host:
            return
        raise RuntimeError(
            f"between its blocks {type(self._model).__name__} changes {name!r} of stage {max(stages)} in place during "
            f"the turn of stage {stage}, for micro-batch {microbatch}; the other stage may use it at the same time, "
            "for a different micro-batch; change it in its block, or before the run; a block that is called after "
            "blocks of later stages belongs to the last of them: name the blocks in the order of their calls, "
            "GPipe(model, blocks=[...])"
        )

    @cached_property
    def _found(self) -> dict[int, tuple[str, Tensor, set[int]]]:
        """Map memory to the name of a tensor there, the tensor, and the stages of all tensors there."""
        inside = {module for block in self._blocks for module in block.modules()}
        found: dict[int, tuple[str, Tensor, set[int]]] = {}
        for stage, part in enumerate(self._parts):
            buffers = [buffer for each in part.modules() if each in inside for buffer in each.buffers(recurse=False)]
            kept = {*map(id, buffers)}
            for name, tensor in (*part.named_parameters(), *part.named_buffers()):
                if isinstance(tensor, nn.Parameter) or id(tensor) in kept:
                    found.setdefault(storage_id(tensor), (name, tensor, set()))[2].add(stage)
        return found
