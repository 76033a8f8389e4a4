"""The memory that CPU kernels allocate and free while they run, which no dispatch mode sees."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_KERNELS = frozenset({_aten.convolution, _aten.convolution_backward, _aten.native_batch_norm_backward})


def workspace(func: Any, args: Any, result: Any) -> int:
    """Bytes that the kernel of ``func`` needs at its fullest moment, beside its arguments and results; 0 if few.

    oneDNN uses a memory order of its own: a convolution has copies of all that it reads, and later one of its result; a
    backward has copies of the gradient and the input, or twice the gradient of the input. Values whose channels are
    last need none. (Measured on x86 processors by the allocator's events.)
    """
    packet = getattr(func, "_overloadpacket", None)
    if packet not in _KERNELS:
        return 0
    given, made = ([x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in (args, result))
    if given[0].device.type != "cpu" or (given[0].dim() == 4 and given[0].stride(1) == 1):
        return 0
    if packet is _aten.convolution:
        is_transposed = args[6]
        return int(max(given[0].nbytes + given[1].nbytes, (1 + is_transposed) * made[0].nbytes))
    if packet is _aten.convolution_backward:
        gradient, x, weight = (each.nbytes for each in given[:3])
        return int(max(gradient + x + weight, 2 * x if args[-1][0] else 0))
    return int(given[1].nbytes)
