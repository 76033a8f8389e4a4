"""Cut a row of several documents between documents, into micro-batches of about equal numbers of tokens.

Data loaders pack texts of different lengths into one row, instead of padding each. Their positions begin again with
each document, and models attend within a document only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from microbatch import Replicate, Split, flatten, leaf_paths, rules, unflatten

from ..module._cut import Checked
from ..module._inputs import Inputs

_IGNORED = -100
_DEFAULT = rules(torch.empty(1))[0]
"""The rule of a tensor without one."""


@dataclass(frozen=True)
class Packed:
    """For ``in_spec=`` of a model: documents share a row, and the row is cut between documents.

    Every tensor of shape (1, tokens, ...) is cut at the same tokens, so that the largest micro-batch has as few tokens
    as possible. Cumulative lengths of documents, such as ``cu_seq_lens_q``, become those of the documents of each
    micro-batch. Outputs, losses and gradients are those of the whole row if the model keeps documents apart: then
    ``pipe.evaluate()`` returns the same with ``pipe.chunks = 1``, by which the row is not cut. A mini-batch of several
    rows is cut by rows, as always; so is one without positions.

    Args:
        positions: the keyword with the position of each token in its document, (1, tokens). A document begins where
            positions do not go on by 1.

    >>> from gpipe import GPipe, Packed
    >>> def pipe_of(model):
    ...     return GPipe(model, devices=["cpu", "cpu"], chunks=4, in_spec=Packed())
    """

    positions: str = "position_ids"


class Pieces(NamedTuple):
    """How a row is cut.

    Attributes:
        documents: the number of tokens of each document, for each micro-batch.
    """

    documents: Sequence[Sequence[int]]

    @property
    def tokens(self) -> list[int]:
        """The number of tokens of each micro-batch."""
        return [*map(sum, self.documents)]

    @property
    def begins(self) -> list[int]:
        """The first token of each micro-batch but the first."""
        return [*accumulate(self.tokens)][:-1]

    @property
    def lengths(self) -> list[int]:
        return [length for documents in self.documents for length in documents]


def pieces_of(rule: Any, inputs: Any, chunks: int) -> Pieces | None:
    """Return how the only row of ``inputs`` is cut; None if they have several, or no positions, or by another rule.

    Raises:
        ValueError: the positions have no dimension of tokens.
    """
    positions = Inputs.of(inputs).kwargs.get(rule.positions) if isinstance(rule, Packed) else None
    if not isinstance(positions, Tensor):
        return None
    if positions.dim() != 2:
        raise ValueError(
            f"by Packed(), {rule.positions} has a position for each token, of shape (1, tokens); got "
            f"{tuple(positions.shape)}"
        )
    tokens = positions.shape[1]
    sizes = {leaf.shape[:2] for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor) and leaf.dim() > 1}
    if any(len(size) > 1 and size[0] > 1 and size[1] == tokens for size in sizes):
        return None  # positions of one row may be those of all
    from blockpartition import solve  # imported here, because pipes without documents do not need it

    begins = [0, *((positions[0].diff() != 1).nonzero()[:, 0] + 1).tolist(), tokens]
    lengths = [end - begin for begin, end in pairwise(begins)]
    return Pieces(solve(lengths, min(chunks, len(lengths))))


def share_a_row(inputs: Any) -> bool:
    """Return whether ``inputs`` have one row, whose ``position_ids`` begin again in it."""
    positions = Inputs.of(inputs).kwargs.get(Packed.positions)
    if not isinstance(positions, Tensor) or positions.dim() != 2 or len(positions) != 1:
        return False
    return bool((positions.diff() != 1).any())


def cut_between(pieces: Pieces, given: Checked) -> Checked:
    """Return ``given`` with rules by which :func:`microbatch.scatter` cuts it into ``pieces``.

    Raises:
        ValueError: a tensor is neither divided into the tokens of the row, nor one of cumulative lengths, nor has a
            rule; or a mask does not keep documents apart.
    """
    leaves, tree = flatten(given.bare)
    found = rules(given.bare, given.spec, given.root)
    for k, (leaf, rule, path) in enumerate(zip(leaves, found, leaf_paths(given.bare, given.root), strict=True)):
        if isinstance(leaf, Tensor) and rule is _DEFAULT:
            leaves[k], found[k] = _cut(pieces, leaf, path)
    mask = Inputs.of(given.bare).kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and len(pieces.lengths) > 1 and len({*mask.flatten().tolist()} - {0}) < 2:
        raise ValueError(
            "attention_mask has the same value for all documents of a row, by which models attend from one document to "
            "those before; leave it out, so that they keep documents apart by their positions"
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
        f"by Packed(), the row of {sum(pieces.tokens)} tokens is cut between its {len(pieces.lengths)} documents, and "
        f"{path} has shape {tuple(tensor.shape)}; expected (1, tokens, ...), or the cumulative lengths of the "
        "documents; put microbatch.Replicate() around it if each micro-batch is to get it whole"
    )


def _cumulative(lengths: Sequence[int]) -> list[int]:
    return [*accumulate(lengths, initial=0)]


def are_apart(pieces: Pieces, labels: Any) -> bool:
    """Return whether no label counts at the beginning of a micro-batch: its loss would need the token before."""
    is_row = isinstance(labels, Tensor) and labels.shape == (1, sum(pieces.tokens))
    return is_row and bool((labels[0, pieces.begins] == _IGNORED).all())


def mean_of_row() -> ValueError:
    return ValueError(
        'reduction="mean" is a mean over rows, and a row of several documents is cut by Packed(); leave it out, or use '
        'reduction="sum"'
    )
