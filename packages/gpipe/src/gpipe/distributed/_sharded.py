"""Support stages whose parameters are sharded over replicas by ``torch.distributed.fsdp.fully_shard``.

By default, FSDP reduces gradients after the backward of every micro-batch. Here it reduces them once, at the end of the
step. There is no public API for this, so this module makes the same calls as torch's pipelining
(``perform_reduce_grad``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .._fsdp import fsdp_modules
from ..engine._losses import Losses
from ..engine._scale import Scale, scale_in_place
from ._tied import TiedTensor


class Sharding:
    """The sharded parameters of a rank, which may change between steps."""

    def __init__(self, partitions: nn.ModuleList, tied: Sequence[TiedTensor]) -> None:
        self._partitions = partitions
        self._tied = tied
        names: dict[Tensor, list[str]] = {}
        for name, parameter in self._iterate_parameters():
            names.setdefault(parameter, []).append(name)
        self._shared = [each for each in names.values() if len(each) > 1]

    def _iterate_parameters(self) -> Iterator[tuple[str, Tensor]]:
        for partition in self._partitions:
            yield from partition.named_parameters(remove_duplicate=False)

    def expect_whole(self) -> None:
        """Raise ValueError if a parameter of several stages is sharded: each stage would train a separate shard."""
        if not fsdp_modules(self._partitions):
            return
        named = dict(self._iterate_parameters())
        apart = [names for names in self._shared if len({id(named[name]) for name in names}) > 1]
        far = [each.tensor for each in self._tied if hasattr(each.tensor, "placements")]
        apart += [[name] for name, parameter in named.items() if any(parameter is tensor for tensor in far)]
        if apart:
            raise ValueError(
                f"parameter {apart[0][0]!r} is shared by several stages, and fully_shard has sharded it in each stage "
                "separately; exclude it with fully_shard(..., ignored_params={parameter}) and average its gradient, or "
                "put the layers that share it into one stage"
            )

    @contextmanager
    def reduced_once(self, loss: Losses) -> Iterator[None]:
        """Run a step with this ``loss``, and reduce gradients once, at its end, unless the step has failed."""
        states = [module._get_fsdp_state() for module in fsdp_modules(self._partitions)]
        before = {group: _settings(group) for state in states for group in _groups(state)}
        parameters = [parameter for group in before for parameter in group.fsdp_params if _keeps_apart(parameter)]
        apart = [_take_gradient(parameter) for parameter in parameters]
        for state in states:
            state._state_ctx.is_last_backward = False
        for group in before:
            _set(group, dict.fromkeys(before[group], False))
        try:
            yield
        finally:
            for group, settings in before.items():
                _set(group, settings)
            for state in states:
                state._state_ctx.is_last_backward = True
        for parameter, earlier in zip(parameters, apart, strict=True):
            _give_back(parameter, earlier, loss.scale)
        for state in states:
            if state._is_root:
                state._root_post_backward_final_callback()


def _groups(state: Any) -> list[Any]:
    """Return the groups of parameters that are gathered together. Since torch 2.12, a module may have several."""
    if hasattr(state, "_fsdp_param_groups"):
        return [*state._fsdp_param_groups]
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


_WAITING = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


def _settings(group: Any) -> dict[str, bool]:
    return {name: getattr(group, name) for name in _WAITING}


def _set(group: Any, settings: Mapping[str, bool]) -> None:
    for name, value in settings.items():
        setattr(group, name, value)


def _keeps_apart(parameter: Any) -> bool:
    """Return whether unreduced gradients of a different dtype are kept outside ``.grad``, as before torch 2.15."""
    return not isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


def _take_gradient(parameter: Any) -> Tensor | None:
    """Remove and return the unreduced gradient of a different dtype, which earlier backwards have accumulated."""
    grown: Tensor | None = parameter.unsharded_accumulated_grad
    parameter.unsharded_accumulated_grad = None
    return grown


def _give_back(parameter: Any, earlier: Tensor | None, scale: Scale) -> None:
    """Apply the loss's ``scale`` to the unreduced gradient of this step, and add the ``earlier`` one."""
    grown = _take_gradient(parameter)
    if grown is not None:
        grown = scale_in_place(grown, scale)
    parameter.unsharded_accumulated_grad = earlier if grown is None else grown if earlier is None else grown + earlier
