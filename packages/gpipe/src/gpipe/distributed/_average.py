"""The average of gradients over replicas, each of which has computed the gradients of its own rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._gathering import Gathering, gathering_of
from ._groups import Group, expect_group

BUCKET: Final = 25 * 2**20
"""Bytes that are reduced in one collective: smaller ones spend more time on latency, larger ones start later."""

_agreed: WeakKeyDictionary[nn.Module, WeakSet[dist.ProcessGroup]] = WeakKeyDictionary()


def average_gradients(rank: nn.Module, group: Group | None = None) -> None:
    """Replace the gradients of the parameters by their average over replicas. Call it after ``step``.

    Each replica is a pipe of its own, which has computed the gradients of its rows. All processes of ``group`` call
    this together: the processes with the same stages, one of each replica. On a mesh of replicas and stages the group
    is ``mesh["replicas"]``. A replica whose ``step`` has failed does not call this; the others wait for it
    until the timeout, unless each :class:`gpipe.distributed.Rank` was made with ``replicas=``: then all of them raise
    in ``step``.

    Every replica counts the same, as in ``DistributedDataParallel``. So if losses are means, give each replica the same
    number of rows; or have ``loss_fn`` return the sum times the number of replicas, divided by the number of all rows.

    A parameter without a gradient on some replicas, such as one that their rows did not use, counts as zero there. If
    it has no gradient on any replica, ``.grad`` stays None. If its gradients are sparse on all replicas, so is the
    average.

    Gradients on the CPU travel over gloo connections of this package's own; on accelerators, over ``group``.

    Args:
        rank: the module with the gradients: a :class:`gpipe.distributed.Rank`, a :class:`gpipe.GPipe` or a plain
            module.
        group: the replicas, as a process group or a mesh of one dimension; all processes by default.

    Raises:
        RuntimeError: there is no process group, or this process is not in it.
        ValueError: the parameters differ between replicas, or are sharded already; on every replica.
        LostRankError: the process of a replica has ended. On accelerators, if it ends only in the reduction itself, the
            backend of ``group`` decides how long the others wait for it.
        RemoteError: another replica ran out of memory, or failed otherwise.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "stages"))  # doctest: +SKIP
    >>> rank = Rank(model, [3, 3], group=mesh["stages"], replicas=mesh["replicas"])  # doctest: +SKIP
    >>> loss = rank.step(x, y, loss_fn=loss_fn)  # doctest: +SKIP
    >>> average_gradients(rank, mesh["replicas"])  # doctest: +SKIP
    """
    group = expect_group(group)
    _expect_replicas(rank, group)
    parameters = [parameter for parameter in rank.parameters() if parameter.requires_grad]
    if not parameters or group.size() == 1:
        return
    together = gathering_of(group)
    assert together.group is not None
    with together.collectives():
        dense, sparse = _present(parameters, together.group)
    is_on_hosts = all(parameter.device.type == "cpu" for parameter in parameters)
    # Only connections of our own can be closed when a replica fails. They are gloo's, which is for the CPU.
    over, collectives = (together.group, together.collectives()) if is_on_hosts else (group, nullcontext())
    finish: Any = together.finish if is_on_hosts else _finish
    with torch.no_grad():
        # What follows the last collective is done outside: if it fails, the others do not wait for this replica.
        with collectives:
            averages = _averages(dense, over, finish)
        if sparse:
            with together.collectives():  # few backends can add sparse tensors; gloo can
                found = [(parameter, _sparse_average(parameter, dims, together)) for parameter, dims in sparse]
        for gradients, flat in averages:
            _copy_back(gradients, flat)
        for parameter, average in found if sparse else ():
            parameter.grad = average.to(parameter.device).coalesce()


def _expect_replicas(rank: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise, in the first call, if the members of ``group`` have different parameters."""
    if group in _agreed.setdefault(rank, WeakSet()):
        return
    with gathering_of(group).agreement() as found:
        trained = {name: parameter for name, parameter in rank.named_parameters() if parameter.requires_grad}
        sharded = [name for name, parameter in trained.items() if hasattr(parameter, "placements")]
        if sharded:
            raise ValueError(
                f"{sharded[0]!r} and {len(sharded) - 1} other parameters are sharded over processes, which averages "
                "their gradients already; leave average_gradients() out"
            )
        found.alike = {
            "the first parameter": next(iter(trained), None),
            "the number of parameters": len(trained),
            "the list of parameters": [[name, list(p.shape), str(p.dtype)] for name, p in trained.items()],
        }
    _agreed[rank].add(group)


def _present(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[list[Tensor], list[tuple[Tensor, int]]]:
    """Those of ``parameters`` that have a gradient on any replica, in two lists.

    Returns:
        The parameters with a dense gradient on some replica; and the others, each with the number of its sparse
        dimensions.
    """
    gradients = [parameter.grad for parameter in parameters]
    kinds = [(0, 0) if g is None else (0, g.sparse_dim()) if g.is_sparse else (1, 0) for g in gradients]
    flags = torch.tensor(kinds, dtype=torch.uint8)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    found = list(zip(parameters, flags.tolist(), strict=True))
    return [p for p, (dense, _) in found if dense], [(p, dims) for p, (dense, dims) in found if dims and not dense]


def _finish(work: Any) -> None:
    work.wait()


def _averages(
    parameters: Iterable[Tensor], group: dist.ProcessGroup, finish: Callable[[Any], None]
) -> list[tuple[list[Tensor], Tensor]]:
    """For each bucket the gradients, and one tensor with all their averages; ``finish`` waits for a reduction."""
    under_way = [_begun(bucket, group) for bucket in _buckets(parameters)]
    for work, _, _ in under_way:
        finish(work)
    return [(gradients, flat) for _, gradients, flat in under_way]


def _copy_back(gradients: Sequence[Tensor], flat: Tensor) -> None:
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _begun(bucket: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Any, list[Tensor], Tensor]:
    """Start to reduce a bucket.

    Returns:
        The reduction, the gradients of the bucket, and the tensor that will hold their average.
    """
    gradients = [_dense(parameter) for parameter in bucket]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat /= group.size()  # before the sum, which could overflow in float16
    return dist.all_reduce(flat, group=group, async_op=True), gradients, flat


def _dense(parameter: Tensor) -> Tensor:
    """The gradient as a dense tensor; zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of parameters of one dtype and device, of up to ``BUCKET`` bytes."""
    kinds = sorted(parameters, key=_kind)
    for _, alike in groupby(kinds, _kind):
        bucket: list[Tensor] = []
        size = 0
        for parameter in alike:
            if bucket and size + parameter.nbytes > BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += parameter.nbytes
        yield bucket


def _kind(parameter: Tensor) -> tuple[str, str]:
    return str(parameter.dtype), str(parameter.device)


def _sparse_average(parameter: Tensor, dims: int, together: Gathering) -> Tensor:
    """The average of sparse gradients with that many sparse dimensions, on the host."""
    if parameter.grad is None:
        values = torch.empty(0, *parameter.shape[dims:], dtype=parameter.dtype, device="cpu")
        indices = torch.empty(dims, 0, dtype=torch.int64, device="cpu")
        own = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False).coalesce()
    else:
        own = (parameter.grad.coalesce() / len(together.members)).cpu()
    together.finish(dist.all_reduce(own, group=together.group, async_op=True))
    return own
