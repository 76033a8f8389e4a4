"""Average gradients over data-parallel replicas, in buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._agreement import METHOD, expect_same
from ._errors import RemoteError
from ._object_exchange import ObjectExchange

BUCKET: Final = 25 * 2**20
"""Bytes per collective. Smaller buckets spend more time on latency, and larger ones start later."""


def average(parameters: Sequence[Tensor], meeting: ObjectExchange, group: dist.ProcessGroup) -> None:
    """Average the gradients of ``parameters`` over ``group``, whose members exchange reports by ``meeting``."""
    gloo, me = meeting.groups.gloo, meeting.groups.me
    # Only private connections can be closed when a replica fails. They use gloo, which is for the CPU.
    is_on_hosts = all(parameter.device.type == "cpu" for parameter in parameters)
    there = _present(parameters, meeting)
    with torch.no_grad(), meeting.reaching():
        meeting.groups.peers.update({*range(group.size())} - {me})  # gloo chooses which of them exchange messages
        for bucket in _buckets(there):
            _reduce(bucket, group, gloo if is_on_hosts else None)
        meeting.all_gather({})  # if one fails, all fail


def find_averaged_parameters(module: nn.Module, group: dist.ProcessGroup) -> list[nn.Parameter]:
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


def _present(parameters: Sequence[Tensor], meeting: ObjectExchange) -> list[Tensor]:
    """Return the ``parameters`` that have a gradient on any replica."""
    own = bytes(parameter.grad is not None for parameter in parameters)
    reports = meeting.all_gather({METHOD: "average_gradients", "present": own})
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
