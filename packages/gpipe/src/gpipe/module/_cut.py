"""A mini-batch on its way to the first stage, and a target on its way to the loss: checked, moved, and cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import Batch, Split, Versions, check, is_flat, map_tensors, scatter_views, unwrap

from ..engine._autograd import reattach
from ..values._leaves import Arguments
from ._whole import expect_no_rows, replicated


class Checked(NamedTuple):
    """A value that can be cut.

    Attributes:
        given: as it came, with rules around its parts.
        bare: without them.
        spec: which says the same as they.
        root: what the value is called.
    """

    given: Any
    bare: Any
    spec: Any
    root: str


def checked(value: Any, spec: Any, root: str = "input") -> Checked:
    """``value``, of which tensors are cut as ``spec`` says, and all else goes whole into each micro-batch.

    Where the spec is a tree it has to say so itself.

    Raises:
        TypeError, ValueError: it cannot be cut, and why.
    """
    if isinstance(value, Tensor) and spec is None:
        return Checked(value, value, None, root)
    if isinstance(value, Arguments) and not value.args and isinstance(spec, Mapping):
        spec = Arguments((), dict(spec))
    free = spec is None or isinstance(spec, Split)
    bare, spec = unwrap(replicated(value, root) if free else value, spec)
    check(bare, spec)
    return Checked(value if free else None, bare, spec, root)


def cut(value: Checked, device: torch.device, chunks: int) -> tuple[list[Batch], Versions]:
    """The micro-batches of ``value`` on ``device``, and how changes in place reach them and what they were cut from."""
    bare = value.bare
    there = bare.to(device) if isinstance(bare, Tensor) else map_tensors(lambda tensor: tensor.to(device), bare)
    views, versions = scatter_views(there, chunks, value.spec)
    if not is_flat(value.given):
        expect_no_rows(value.given, views, value.root)
    return reattach(there, views, value.spec), versions
