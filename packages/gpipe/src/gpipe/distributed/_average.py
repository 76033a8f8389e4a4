"""Average gradients over data-parallel replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._agreement import METHOD, agreement, expect_same
from ._errors import RemoteError
from ._groups import Group, expect_group
from ._rendezvous import Rendezvous, gathering_of

BUCKET: Final = 25 * 2**20
"""Bytes per collective. Smaller buckets spend more time on latency, and larger ones start later."""

_agreed: WeakKeyDictionary[nn.Module, WeakSet[dist.ProcessGroup]] = WeakKeyDictionary()


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
        ValueError: the parameters differ between replicas, or are already sharded. Raised on every replica.
        LostRankError: another replica has exited or failed. Some gradients may be averaged already: restart all
            processes from the last checkpoint. On accelerators the backend of ``group`` determines how long replicas
            wait.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))  # doctest: +SKIP
    >>> rank = Rank(model, [3, 3], group=mesh["stages"])  # doctest: +SKIP
    >>> loss = rank.step(x, y, loss_fn=loss_fn)  # doctest: +SKIP
    >>> average_gradients(rank, mesh["replicas"])  # doctest: +SKIP
    """
    group = expect_group(group)
    _expect_replicas(rank, group)
    parameters = [parameter for parameter in rank.parameters() if parameter.requires_grad]
    if parameters and group.size() > 1:
        average(parameters, gathering_of(group), group)


def average(parameters: Sequence[Tensor], meeting: Rendezvous, group: dist.ProcessGroup) -> None:
    """Average the gradients of ``parameters`` over ``group``, whose members exchange reports by ``meeting``."""
    gloo, me = meeting.groups.gloo, meeting.groups.me
    # Only private connections can be closed when a replica fails. They use gloo, which is for the CPU.
    is_on_hosts = all(parameter.device.type == "cpu" for parameter in parameters)
    there = _present(parameters, meeting)
    with torch.no_grad(), meeting.reaching():
        meeting.groups.peers.update({*range(group.size())} - {me})  # gloo chooses which of them exchange messages
        for bucket in _buckets(there):
            _reduce(bucket, group, gloo if is_on_hosts else None)
        meeting.meet({})  # if one fails, all fail


def averaged_over(module: nn.Module, group: dist.ProcessGroup) -> list[nn.Parameter]:
    """Return the trained parameters whose gradients are to be averaged over ``group``.

    Not those that ``fully_shard`` has sharded over it, because it averages them. ValueError for a parameter that is
    sharded over some members of ``group``, but not all.
    """
    others, found = {*dist.get_process_group_ranks(group)} - {dist.get_rank()}, []
    for name, parameter in module.named_parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        among = others if mesh is None else others.intersection(mesh.mesh.flatten().tolist())
        if among != others and among:
            raise ValueError(
                f"{name!r} is sharded over rank {min(among)}, but not over rank {min(others - among)} of replicas=, so "
                "its gradient cannot be averaged over all of them; shard it over the others as well, with "
                'fully_shard(..., mesh=mesh["dp"]), or call step() in rank.no_sync(), and then '
                'average_gradients(rank, mesh["dp"])'
            )
        if parameter.requires_grad and (mesh is None or not among):
            found.append(parameter)
    return found


def _reduce(bucket: Sequence[Tensor], group: dist.ProcessGroup, gloo: Any) -> None:
    """Average the gradients of these parameters over ``gloo``, or over ``group`` if ``gloo`` is None."""
    gradients = [_local(_dense(parameter)) for parameter in bucket]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat /= group.size()  # divided first, because the sum could overflow in float16
    if gloo is None:
        dist.all_reduce(flat, group=group)
    else:
        gloo.allreduce([flat]).wait()
    for gradient, part in zip(gradients, torch.split(flat, [each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _expect_replicas(rank: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise ValueError if the members of ``group`` have different parameters. Checked in the first call only."""
    if group in _agreed.setdefault(rank, WeakSet()):
        return
    with agreement(gathering_of(group), "average_gradients") as found:
        trained = {name: parameter for name, parameter in rank.named_parameters() if parameter.requires_grad}
        averaged = {*averaged_over(rank, group)}
        sharded = [name for name, parameter in trained.items() if parameter not in averaged]
        if sharded:
            raise ValueError(
                f"{sharded[0]!r} and {len(sharded) - 1} other parameters are sharded over processes, so their "
                "gradients are already averaged; omit average_gradients()"
            )
        found.alike = {
            "the first parameter": next(iter(trained), None),
            "the list of parameters": [[name, list(p.shape), str(p.dtype)] for name, p in trained.items()],
        }
    _agreed[rank].add(group)


def _present(parameters: Sequence[Tensor], meeting: Rendezvous) -> list[Tensor]:
    """Return the ``parameters`` that have a gradient on any replica."""
    own = bytes(parameter.grad is not None for parameter in parameters)
    reports = meeting.meet({METHOD: "average_gradients", "present": own})
    for report in reports:
        if "failed" in report:
            raise RemoteError(f"another replica has failed: {report['failed']}")
    expect_same(reports, meeting.groups.members, METHOD)
    flags = [report["present"] for report in reports]
    if len({*map(len, flags)}) > 1:
        raise ValueError(
            f"the replicas train different numbers of parameters: {[*map(len, flags)]}; set requires_grad equally on "
            "all replicas"
        )
    return [parameter for k, parameter in enumerate(parameters) if any(each[k] for each in flags)]


def _dense(parameter: Tensor) -> Tensor:
    """Make ``parameter.grad`` dense, zeros if it is None, and return it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def _local(gradient: Any) -> Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient  # type: ignore[no-any-return]


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    left = BUCKET
    for parameter in sorted(parameters, key=_kind):
        if bucket and (parameter.nbytes > left or _kind(parameter) != _kind(bucket[0])):
            yield bucket
            bucket, left = [], BUCKET
        bucket.append(parameter)
        left -= parameter.nbytes
    if bucket:
        yield bucket


def _kind(parameter: Tensor) -> tuple[str, str]:
    return str(parameter.dtype), str(parameter.device)
