"""Split a row of several documents between documents, into micro-batches of about equal numbers of tokens.

Data loaders pack texts of different lengths into one row, instead of padding each. Positions restart with each
document, and models attend only within a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import Replicate, Split, flatten, leaf_paths, rules, unflatten

from ..module._inputs import Inputs
from ..module._split_batch import Checked

_IGNORED = -100
_DEFAULT = rules(torch.empty(1))[0]
"""The default rule."""


@dataclass(frozen=True)
class Packed:
    """An ``in_spec`` for models whose documents share a row: the row is split between documents.

    Every tensor of shape (1, tokens, ...) is split at the same tokens, so that the largest micro-batch has as few
    tokens as possible. Cumulative lengths of documents, such as ``cu_seq_lens_q``, are recomputed per micro-batch. If
    the model keeps documents apart, outputs, losses and gradients match the full row's. To verify this, compare
    ``pipe.evaluate()`` with its result for ``pipe.chunks = 1``, which does not split the row. A mini-batch of several
    rows, or without positions, is split by rows as usual.

    Args:
        positions: the keyword argument with the position of each token in its document, of shape (1, tokens). A new
            document begins wherever the position does not increase by 1.

    >>> from gpipe import GPipe, Packed
    >>> def build_pipe(model):
    ...     return GPipe(model, devices=["cpu", "cpu"], chunks=4, in_spec=Packed())
    """

    positions: str = "position_ids"


class Pieces(NamedTuple):
    """A division of a row into micro-batches.

    Attributes:
        documents: the number of tokens of each document, per micro-batch.
    """

    documents: Sequence[Sequence[int]]

    @property
    def tokens(self) -> list[int]:
        """The number of tokens of each micro-batch."""
        return [*map(sum, self.documents)]

    @property
    def begins(self) -> list[int]:
        """The index of the first token of each micro-batch but the first."""
        return [*accumulate(self.tokens)][:-1]

    @property
    def lengths(self) -> list[int]:
        return [length for documents in self.documents for length in documents]


def find_pieces(rule: Any, inputs: Any, chunks: int) -> Pieces | None:
    """Return how to split the only row of ``inputs``; None for several rows, no positions, or a different ``rule``.

    Raises:
        ValueError: the positions are not two-dimensional.
    """
    positions = Inputs.of(inputs).kwargs.get(rule.positions) if isinstance(rule, Packed) else None
    if not isinstance(positions, Tensor):
        return None
    if positions.dim() != 2:
        raise ValueError(
            f"Packed() expects {rule.positions} with one position per token, of shape (1, tokens); got "
            f"{tuple(positions.shape)}"
        )
    tokens = positions.shape[1]
    sizes = {leaf.shape[:2] for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.dim() > 1}
    if any(len(size) > 1 and size[0] > 1 and size[1] == tokens for size in sizes):
        return None  # one row of positions may apply to every row
    from blockpartition import solve  # imported here, as most pipes do not need it

    begins = [0, *((positions[0].diff() != 1).nonzero()[:, 0] + 1).tolist(), tokens]
    lengths = [end - begin for begin, end in pairwise(begins)]
    return Pieces(solve(lengths, min(chunks, len(lengths))))


def share_a_row(inputs: Any) -> bool:
    """Return whether ``inputs`` have a single row whose ``position_ids`` restart within it."""
    positions = Inputs.of(inputs).kwargs.get(Packed.positions)
    if not isinstance(positions, Tensor) or positions.dim() != 2 or len(positions) != 1:
        return False
    return bool((positions.diff() != 1).any())


def cut_between(pieces: Pieces, given: Checked) -> Checked:
    """Return ``given`` with rules that let :func:`microbatch.scatter` split it into ``pieces``.

    Raises:
        ValueError: a tensor without a rule has neither the shape (1, tokens, ...) nor cumulative lengths as its values;
            or the attention mask does not keep documents apart.
    """
    leaves, tree = flatten(given.bare)
    found = rules(given.bare, given.spec, given.root)
    for k, (leaf, rule, path) in enumerate(zip(leaves, found, leaf_paths(given.bare, given.root), strict=True)):
        if isinstance(leaf, Tensor) and rule is _DEFAULT:
            leaves[k], found[k] = _cut(pieces, leaf, path)
    mask = Inputs.of(given.bare).kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and len(pieces.lengths) > 1 and len({*mask.flatten().tolist()} - {0}) < 2:
        raise ValueError(
            "attention_mask has the same value for all documents of a row, so that documents attend to previous ones; "
            "omit it, so that models keep documents apart by their positions"
        )
    return Checked(unflatten(leaves, tree), unflatten(found, tree), given.root)


def _cut(pieces: Pieces, tensor: Tensor, path: Any) -> tuple[Tensor, Any]:
    if not tensor.dim():
        return tensor, Replicate()
    if tensor.dim() > 1 and tensor.shape[:2] == (1, sum(pieces.tokens)):
        return tensor, Split(dim=1, counts=pieces.tokens)
    if tensor.dim() == 1 and tensor.tolist() == _cumulative(pieces.lengths):
        parts = [*map(_cumulative, pieces.documents)]
        return tensor.new_tensor([*chain(*parts)]), Split(counts=[*map(len, parts)])
    raise ValueError(
        f"Packed() splits the row of {sum(pieces.tokens)} tokens between its {len(pieces.lengths)} documents, but "
        f"{path} has shape {tuple(tensor.shape)}; expected (1, tokens, ...), or the cumulative lengths of the "
        "documents; wrap it in microbatch.Replicate() to pass it whole to each micro-batch"
    )


def _cumulative(lengths: Sequence[int]) -> list[int]:
    return [*accumulate(lengths, initial=0)]


def are_apart(pieces: Pieces, labels: Any) -> bool:
    """Return whether labels at the start of micro-batches are ignored. Their losses would need the previous token."""
    is_row = isinstance(labels, Tensor) and labels.shape == (1, sum(pieces.tokens))
    return is_row and bool((labels[0, pieces.begins] == _IGNORED).all())


def mean_of_row() -> ValueError:
    return ValueError(
        'reduction="mean" is a mean over rows, but Packed() splits a single row; omit it, or use reduction="sum"'
    )
