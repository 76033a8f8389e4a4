""":func:`average_gradients`, which all ranks and replicas call together."""

from __future__ import annotations

from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch import nn

from ._agreement import agreement
from ._average import average, find_averaged_parameters
from ._calls import announce
from ._deferred_signals import allow_signals, defer_signals
from ._groups import Group, expect_group
from ._object_exchange import get_exchange
from ._rank import Rank

_agreed: WeakKeyDictionary[nn.Module, WeakSet[dist.ProcessGroup]] = WeakKeyDictionary()


@defer_signals()
def average_gradients(rank: nn.Module, group: Group | None = None) -> None:
    """Average all gradients over the replicas, in place. Call this after ``step``.

    A :class:`gpipe.distributed.Rank` with ``replicas=`` does this in ``step``. All processes of ``group`` call this
    together: the processes with the same stages, one per replica, such as ``mesh["replicas"]``. If the ``step`` of a
    replica fails, the others wait for it until the timeout.

    All replicas have the same weight. So if losses are means, give each replica the same number of rows, or let
    ``loss_fn`` return the sum times the number of replicas, divided by the total number of rows. A missing gradient
    counts as zero; if no replica has it, ``.grad`` stays None. Averages are dense. Gradients on the CPU are reduced
    over private gloo connections, and gradients on accelerators over ``group``.

    Args:
        rank: the module with the gradients: a :class:`gpipe.distributed.Rank`, a :class:`gpipe.GPipe` or a plain
            module.
        group: the replicas, as a process group or a one-dimensional mesh; by default all processes.

    Raises:
        RuntimeError: there is no process group, or this process is not in it.
        ValueError: the parameters differ between replicas, or are already sharded; or processes call different methods.
            Raised on every replica.
        LostRankError: another replica has exited or failed. Some gradients may be averaged already: restart all
            processes from the last checkpoint. On accelerators the backend of ``group`` determines how long replicas
            wait.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))  # doctest: +SKIP
    >>> rank = Rank(model, [3, 3], group=mesh["stages"])  # doctest: +SKIP
    >>> loss = rank.step(x, y, loss_fn=loss_fn)  # doctest: +SKIP
    >>> average_gradients(rank, mesh["replicas"])  # doctest: +SKIP
    """
    group = expect_group(group)
    if isinstance(rank, Rank):
        announce(rank, "average_gradients")
    _expect_replicas(rank, group)
    parameters = [parameter for parameter in rank.parameters() if parameter.requires_grad]
    if parameters and group.size() > 1:
        average(parameters, get_exchange(group), group)


def _expect_replicas(rank: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError if the members of ``group`` have different parameters. Checked in the first call only."""
    if group in _agreed.setdefault(rank, WeakSet()):
        return
    with agreement(get_exchange(group), "average_gradients") as found, allow_signals():
        trained = {name: parameter for name, parameter in rank.named_parameters() if parameter.requires_grad}
        averaged = {*find_averaged_parameters(rank, group)}
        sharded = [name for name, parameter in trained.items() if parameter not in averaged]
        if sharded:
            raise ValueError(
                f"{sharded[0]!r} and {len(sharded) - 1} other parameters are sharded over processes, so their "
                "gradients are already averaged; omit average_gradients()"
            )
        found.must_match = {
            "the first parameter": next(iter(trained), None),
            "the list of parameters": [[name, list(p.shape), str(p.dtype)] for name, p in trained.items()],
        }
    _agreed[rank].add(group)
