"""Split a mini-batch into micro-batches."""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ._batch import Batch
from ._gather import concatenate
from ._paths import LeafPath
from ._rules import ROWS, Entries, Rule, Split
from ._spec import cut_rules, entry_lists
from ._tree import is_flat, is_tensors, list_leaves, unflatten
from ._versions import Versions

Sizes = tuple[int, ...]
Cut = Callable[[Tensor, Sizes, int], Sequence[Tensor]]
Divide = partial[Sizes]
"""A function from a number of rows to the rows of each micro-batch."""


def scatter(value: Any, chunks: int, spec: Any = None, root: str = "input", *, least: int = 1) -> list[Batch]:
    """Split `value` into at most `chunks` micro-batches. `gather` is the inverse; gradients flow back to `value`.

    Rows are divided like in `torch.chunk`: 7 rows in 4 chunks make 2, 2, 2, 1, and 2 rows make 2 micro-batches; 0 rows
    make `chunks` empty micro-batches. Tensors of one value may differ in rows if they make the same number of
    micro-batches.

    The micro-batches are copies, so an in-place layer changes neither the other micro-batches nor `value`. A single
    micro-batch is `value` itself, without a copy. `scatter_views` does not copy.

    Args:
        value: a tensor, or a tree of tensors and None. Parts may be wrapped in rules, as in `Split(x, dim=1)` and
            `Replicate(x)`; the micro-batches do not contain the rules.
        chunks: the maximum number of micro-batches.
        spec: how to split leaves: `Split(dim)`, `Replicate()`, or a tree of them that is a prefix of `value`; mappings
            in it may omit keys. `Split(counts=...)` is for tensors with varying rows per sample, and `Entries()` for a
            list with one entry per row.
        root: the name of the value in error messages.
        least: the minimum rows of a micro-batch. If only the last one would have fewer, rows are divided evenly, and
            into fewer micro-batches if necessary: with `least=2`, 10 rows in 4 chunks make 3, 3, 2, 2, and 5 rows make
            3, 2.

    Returns:
        The micro-batches, in the order of the rows.

    Raises:
        TypeError: a leaf is neither a tensor nor None and is not replicated; a tensor is sparse, nested or packed.
        ValueError: `chunks` is below 1; there is no tensor to split, or one without dimensions; tensors make different
            numbers of micro-batches; counts do not sum to the rows; `spec` does not match `value`. The message contains
            the path, as in `input['mask'][1]`.

    >>> [batch.tensor.tolist() for batch in scatter(torch.arange(7), 4)]
    [[0, 1], [2, 3], [4, 5], [6]]
    """
    return _scatter(value, chunks, spec, root, copies, least)


def scatter_views(
    value: Any, chunks: int, spec: Any = None, root: str = "input", *, least: int = 1
) -> tuple[list[Batch], Versions]:
    """Split `value` into views, without a copy. Gradients flow back to `value`.

    Each micro-batch has its own version counter, although an in-place layer on it also changes `value`. `Versions.sync`
    informs autograd about such changes, and about changes of `value` by the caller. Call it before the backward.

    Args:
        value, chunks, spec, root, least: as for `scatter`.

    Returns:
        The micro-batches in the order of the rows, and the object whose `sync` updates the version counters.

    Raises:
        TypeError, ValueError: as for `scatter`.

    >>> x = torch.zeros(4)
    >>> (a, b), versions = scatter_views(x, 2)
    >>> _ = a.tensor.add_(1); versions.sync()
    >>> x, a.tensor._version, b.tensor._version, x._version
    (tensor([1., 1., 0., 0.]), 1, 0, 1)
    """
    versions = Versions()
    return _scatter(value, chunks, spec, root, views(versions), least), versions


def check(value: Any, spec: Any = None, root: str = "input") -> None:
    """Check that `value` is a tree of tensors and None, without reading data.

    The check does not find all values that `scatter` rejects: trees without a tensor, and tensors that are sparse,
    nested or without dimensions, pass.

    Args:
        value: the value to split. Other objects are allowed only inside `Replicate(...)`.
        spec: rules, as for `scatter`.
        root: the name of the value in error messages.

    Raises:
        TypeError: a leaf is neither a tensor nor None and is not replicated. The message contains the path of the
            first, as in `input['mask'][1]`.
        ValueError: `spec` is not a prefix of `value`.

    >>> check((torch.ones(2), None))
    >>> check((torch.ones(2), 42))
    Traceback (most recent call last):
    TypeError: input[1] is of type int, which cannot be split; expected a tensor, None or a tree of them; \
wrap it in Replicate() to pass it whole to every micro-batch
    """
    if spec is not None or not is_flat(value):
        cut_rules(value, spec, root)


def _scatter(value: Any, chunks: int, spec: Any, root: str, cut: Cut, least: int) -> list[Batch]:
    divide = partial(rows_of_parts, chunks=check_count(chunks), least=check_count(least, "least"))
    if spec is None and isinstance(value, Tensor):
        sizes, parts = _column(value, ROWS, divide, cut, LeafPath(value, 0, root))
        return [Batch(part, (rows,)) for part, rows in zip(parts, sizes, strict=True)]
    if spec is None and is_tensors(value) and value:  # an array has no truth value
        return [Batch(*row) for row in _rows(value, [ROWS] * len(value), value, root, divide, cut, [])]
    bare, leaves, rules, tree = cut_rules(value, spec, root)
    is_by_entry = any(isinstance(rule, Entries) for rule in rules)
    lists = [divide(len(entries)) for entries in entry_lists(bare, rules, root)] if is_by_entry else []
    found = _rows(leaves, rules, bare, root, divide, cut, lists)
    batches = [Batch(unflatten(row, tree), rows) for row, rows in found]
    for i, batch in enumerate(batches if lists else ()):
        for sizes, entries in zip(lists, entry_lists(batch.value, rules, root), strict=True):
            entries[:] = entries[sum(sizes[:i]) : sum(sizes[: i + 1])]
    return batches


def _rows(
    leaves: Sequence[Any],
    rules: Sequence[Rule],
    value: Any,
    root: str,
    divide: Divide,
    cut: Cut,
    lists: Sequence[Sizes],
) -> Iterator[tuple[tuple[Any, ...], Sizes]]:
    """Return the leaves of each micro-batch and its rows, once per distinct division of rows."""
    columns = {
        i: _column(leaf, rule, divide, cut, LeafPath(value, i, root))
        for i, (leaf, rule) in enumerate(zip(leaves, rules, strict=True))
        if isinstance(rule, Split)
    }
    if not columns and not lists:
        raise ValueError(f"{root} has no tensor to split; it needs at least one, whose rows are its samples")
    (first, (sizes, _)), *others = columns.items() or [(0, (lists[0], ()))]
    for other in lists:
        if len(other) != len(sizes):
            raise ValueError(
                f"{root} has a list of {sum(other)} entries but {sum(sizes)} rows; Entries() needs one entry per row"
            )
    for i, (other, _) in others:
        if len(other) != len(sizes):
            raise ValueError(
                f"chunks={divide.keywords['chunks']} makes {_story(value, first, sizes, root)} but "
                f"{_story(value, i, other, root)}; all tensors of a mini-batch must give the same number of "
                "micro-batches, or set their rows per sample with Split(counts=...)"
            )
    # A leaf that is not split is the same object in every micro-batch.
    whole = [columns[i][1] if i in columns else (leaf,) * len(sizes) for i, leaf in enumerate(leaves)]
    rows = dict.fromkeys([*(sizes for sizes, _ in columns.values()), *lists])
    return zip(zip(*whole, strict=True), zip(*rows, strict=True), strict=True)


def _story(value: Any, index: int, sizes: Sizes, root: str) -> str:
    shape = tuple(list_leaves(value)[index].shape)
    return f"{len(sizes)} micro-batches of {LeafPath(value, index, root)} with shape {shape}"


def _column(tensor: Tensor, rule: Split, divide: Divide, cut: Cut, place: LeafPath) -> tuple[Sizes, Sequence[Tensor]]:
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else f"of layout {tensor.layout}"
        raise TypeError(f"{place} is {kind}, which cannot be split; make it dense, or wrap it in Replicate()")
    if not -tensor.dim() <= rule.dim < tensor.dim():
        raise ValueError(
            f"{place} has shape {tuple(tensor.shape)} and no dimension {rule.dim} to split; add one, "
            "or wrap it in Replicate()"
        )
    size, counts = tensor.size(rule.dim), rule.counts
    assert not callable(counts)
    samples = divide(size if counts is None else len(counts))
    sizes = samples if counts is None else rows_of_samples(counts, samples)
    if sum(sizes) != size:
        raise ValueError(f"{place} has {size} rows, but the counts of its Split sum to {sum(sizes)}")
    try:
        return samples, cut(tensor, sizes, rule.dim)
    except (TypeError, NotImplementedError) as error:  # a subclass of Tensor may not implement every operator
        raise TypeError(f"{place} is of type {type(tensor).__name__}, which torch cannot split: {error}") from error


def check_count(number: Any, name: str = "chunks") -> int:
    """Convert `number` to an int; raise TypeError or ValueError unless it is an integer of at least 1."""
    try:
        found = operator.index(number)
    except TypeError:
        raise TypeError(f"{name} is {number!r}; expected an integer of at least 1") from None
    if found < 1:
        raise ValueError(f"{name} is {number!r}; expected at least 1")
    return found


def rows_of_parts(rows: int, chunks: int, least: int = 1) -> Sizes:
    """Divide rows like `torch.chunk`: micro-batches get rows / chunks, rounded up, until none are left.

    If only the last one would have fewer than `least`, rows are divided evenly instead.
    """
    if not rows:
        return (0,) * chunks
    size = -(-rows // chunks)
    full, rest = divmod(rows, size)
    if not rest:
        return (size,) * full
    if rest >= least or size < least:
        return (*(size,) * full, rest)
    number = max(1, min(full + 1, rows // least))
    small, larger = divmod(rows, number)
    return (small + 1,) * larger + (small,) * (number - larger)


def rows_of_samples(counts: Sequence[int], samples: Sizes) -> Sizes:
    """Return the rows of each micro-batch, given its number of samples and the number of rows of every sample."""
    rest = iter(counts)
    return tuple([sum(islice(rest, number)) for number in samples])


def copies(tensor: Tensor, sizes: Sizes, dim: int) -> Sequence[Tensor]:
    if len(sizes) == 1:
        return (tensor,)
    # Clones have their own version counters.
    return [part.clone() for part in tensor.split_with_sizes(sizes, dim)]


def views(versions: Versions) -> Cut:
    """Return a function that splits a tensor into parts that share its memory; `versions` tracks in-place changes."""

    def view(tensor: Tensor, sizes: Sizes, dim: int) -> Sequence[Tensor]:
        source = tensor.detach()
        # A single part shares the version counter of its source. Several parts have separate counters, which `versions`
        # synchronizes.
        parts: Sequence[Tensor] = (source,) if len(sizes) == 1 else source.unsafe_split_with_sizes(sizes, dim)
        if len(sizes) > 1:
            versions.add(source, parts)
        return Views.apply(dim, tensor, *parts) if tensor.requires_grad else parts  # type: ignore[no-untyped-call]

    return view


class Views(torch.autograd.Function):
    """The detached parts of a tensor, connected to it."""

    @staticmethod
    def forward(ctx: Any, dim: int, whole: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # unused parts get None instead of zeros
        ctx.dim = dim
        ctx.parts = [(part.shape, part.dtype, part.device) for part in parts]
        # Detach the parts, because autograd returns inputs of a Function as views, which must not be modified in place.
        return tuple(map(Tensor.detach, parts))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rest = (None,) * len(gradients)
        if not [gradient for gradient in gradients if gradient is not None]:
            return None, None, *rest
        parts = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None else gradient
            for gradient, (shape, dtype, device) in zip(gradients, ctx.parts, strict=True)
        ]
        return None, concatenate(parts, ctx.dim), *rest
