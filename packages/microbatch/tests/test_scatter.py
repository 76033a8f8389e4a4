"""A mini-batch is cut as torch.chunk cuts it, into micro-batches that are independent of each other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from microbatch import Arguments, Batch, Replicate, Split, check, gather, scatter, scatter_views

from .same import assert_same
from .strategies import Problem, count, flat_problems, problems

anything = st.one_of(problems(), flat_problems())
seven_in_four = Problem(torch.arange(7), 4, None)


def floats(problem: Problem) -> list[Tensor]:
    return [leaf for leaf in problem.leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


@given(anything)
@example(seven_in_four)
@example(Problem((torch.ones(3, 1),), 2, None))
@example(Problem({"x": torch.ones(0, 2)}, 3, None))
def test_gather_undoes_scatter(problem: Problem) -> None:
    value, chunks, spec = problem
    for batches in (scatter(value, chunks, spec), scatter_views(value, chunks, spec)[0]):
        assert 1 <= len(batches) <= chunks
        assert {len(batch) for batch in batches} == {len(Batch(value))}
        result = gather(batches, spec)
        assert_same(result, value)
        for mine, theirs in zip(Batch(result), Batch(value), strict=True):
            assert mine.requires_grad == theirs.requires_grad


@pytest.mark.parametrize("cut", [scatter, lambda *of: scatter_views(*of)[0]], ids=["copies", "views"])
@given(problem=anything)
@example(Problem((torch.ones(2), torch.ones(3, 4, requires_grad=True)), 2, (None, Split(1))))
def test_the_round_trip_is_the_identity_for_gradients(cut: Any, problem: Problem) -> None:
    value, chunks, spec = problem
    sources = floats(problem)
    for source in sources:
        source.grad = None  # an explicit example is given to both
    weights = [torch.arange(1.0, leaf.numel() + 1, dtype=leaf.dtype).view(leaf.shape) for leaf in sources]
    result = [leaf for leaf in Batch(gather(cut(value, chunks, spec), spec)) if leaf.requires_grad]
    if result:
        torch.autograd.backward([leaf * weight for leaf, weight in zip(result, weights, strict=True)], weights)
    for source, weight in zip(sources, weights, strict=True):
        torch.testing.assert_close(source.grad, weight * weight)


@given(st.integers(0, 40), st.integers(1, 12))
@example(7, 4)
@example(2, 8)
def test_rows_are_dealt_as_torch_chunk_deals_them(rows: int, chunks: int) -> None:
    x = torch.arange(rows)
    expected = [chunk.tolist() for chunk in x.chunk(chunks)]
    assert [batch.tensor.tolist() for batch in scatter(x, chunks)] == expected
    assert [batch.tensor.tolist() for batch in scatter_views(x, chunks)[0]] == expected
    assert len(expected) == count(rows, chunks)


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 4))
@example(10, 4, 2)
@example(5, 4, 2)
@example(3, 2, 2)
@example(3, 3, 2)
def test_last_micro_batch_has_at_least_least_rows(rows: int, chunks: int, least: int) -> None:
    """The split changes only if the last one would be too small; then sizes differ by at most one."""
    x = torch.arange(rows)
    usual = [len(part) for part in x.chunk(chunks)]
    found = [batch.tensor for batch in scatter(x, chunks, least=least)]
    sizes = [len(each) for each in found]
    assert torch.equal(torch.cat(found), x)
    if usual[-1] >= least or usual[0] < least:
        assert sizes == usual
        return
    assert min(sizes) >= least
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == len(usual) or rows // (len(sizes) + 1) < least


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 5), st.booleans())
@example([0, 0, 2], 2, True)
def test_rows_go_where_their_sample_goes(counts: list[int], chunks: int, named: bool) -> None:
    samples = torch.arange(len(counts))
    rows = samples.repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    value = {"counts": torch.tensor(counts, dtype=torch.int64), "samples": samples, "rows": rows}
    spec = {"rows": Split(counts=lambda batch: batch["counts"])}
    for batch in scatter(Arguments((), value), chunks, Arguments((), spec)) if named else scatter(value, chunks, spec):
        part = batch.value.kwargs if named else batch.value
        assert part["rows"].tolist() == part["samples"].repeat_interleave(part["counts"]).tolist()
        assert batch.rows == (len(part["samples"]),)


@pytest.mark.parametrize(
    ("counts", "kind", "message"),
    [
        ([2, 1], ValueError, r"^input\['x'\] has 4 rows, but the counts of its Split sum to 3"),
        ([5, -1], ValueError, r"^counts of Split is \(5, -1\); expected numbers of at least 0"),
        ([2.0, 2.0], TypeError, "expected the number of rows of each sample, .* or a function"),
        (torch.tensor(4), TypeError, "expected the number of rows of each sample"),
        (4, TypeError, "expected the number of rows of each sample"),
    ],
)
def test_counts_are_the_rows_of_the_samples(counts: Any, kind: type[Exception], message: str) -> None:
    for form in (lambda: counts, lambda: lambda value: counts):
        for chunks in (1, 2):
            with pytest.raises(kind, match=message):
                scatter({"x": torch.ones(4)}, chunks, {"x": Split(counts=form())})


@given(anything)
def test_the_caller_keeps_its_value(problem: Problem) -> None:
    before = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in problem.leaves]
    versions = [tensor._version for tensor in Batch(problem.value)]
    scatter(*problem)
    scatter_views(*problem)
    assert_same(problem.leaves, before)
    assert versions == [tensor._version for tensor in Batch(problem.value)]


@pytest.mark.parametrize("grad", [False, True])
@given(rows=st.integers(2, 9), chunks=st.integers(2, 5))
def test_micro_batches_can_be_modified_independently(grad: bool, rows: int, chunks: int) -> None:
    x = torch.ones(rows, requires_grad=grad)
    w = torch.ones(rows, requires_grad=True)
    first, *rest = scatter(x, chunks)
    saved = [batch.tensor * part.tensor for batch, part in zip(rest, scatter(w, chunks)[1:], strict=True)]
    first.tensor.mul_(3)
    torch.cat(saved).sum().backward()
    assert x.detach().eq(1).all()
    assert w.grad is not None
    assert w.grad.sum() == rows - len(first.tensor)


def test_scatter_keeps_no_memory_of_the_source_alive() -> None:
    source = torch.ones(4, requires_grad=True) * 1
    pointer = source.untyped_storage()._weak_ref()
    batches = scatter(source, 2)
    del source
    assert torch.UntypedStorage._expired(pointer)
    gather(batches).sum().backward()


@pytest.mark.parametrize("value", [torch.ones(3), (torch.ones(3), torch.ones(3, 2)), {"x": torch.ones(3)}])
def test_a_single_micro_batch_is_not_copied(value: Any) -> None:
    (batch,) = scatter(value, 1)
    assert all(mine is theirs for mine, theirs in zip(batch, Batch(value), strict=True))
    result = gather([batch])
    assert all(mine is theirs for mine, theirs in zip(Batch(result), Batch(value), strict=True))


def test_gradients_of_replicated_tensor_are_summed() -> None:
    x, w = torch.arange(4.0), torch.ones(1, requires_grad=True)
    batches = scatter((x, w), 2, (None, Replicate()))
    sum((b[0] * b[1]).sum() for b in batches).backward()
    assert w.grad.item() == 6


class Opaque(Tensor):
    """Knows no operator at all."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> "Opaque":
        return Tensor._make_wrapper_subclass(cls, shape)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


@pytest.mark.parametrize("cut", [scatter, scatter_views])
def test_unsplittable_subclass_raises(cut: Any) -> None:
    with pytest.raises(TypeError, match=r"input\['x'\] is of type Opaque, which torch cannot split: ."):
        cut({"x": Opaque((4,))}, 2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("cut", [scatter, scatter_views])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(4).to_sparse(), "of layout torch.sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided), "nested"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
)
def test_sparse_and_nested_tensors_are_refused(cut: Any, make: Callable[[], Tensor], kind: str) -> None:
    with pytest.raises(TypeError, match=rf"input\['mask'\]\[1\] is {kind}, which cannot be split; make it dense"):
        cut({"x": torch.ones(4), "mask": (torch.ones(4), make())}, 2)


@pytest.mark.parametrize("cut", [scatter, scatter_views])
@pytest.mark.parametrize("rule", [Split(), Split(-1), Split(1)])
def test_packed_sequences_are_refused(cut: Any, rule: Split) -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 1), torch.ones(2, 1)])
    message = r"^input has a PackedSequence"
    for value, spec in [((torch.ones(2), packed), (None, rule)), ((torch.ones(2), Split(packed, dim=rule.dim)), None)]:
        with pytest.raises(TypeError, match=message):
            cut(value, 2, spec)
        with pytest.raises(TypeError, match=message):
            check(value, spec)
    with pytest.raises(TypeError, match=message.replace("input", "output")):
        gather([Batch((torch.ones(2), packed))] * 2, (None, rule))
    with pytest.raises(TypeError, match=message):
        cut((torch.ones(2), packed), 2)


@pytest.mark.parametrize(
    ("chunks", "kind"), [([2], TypeError), (2.0, TypeError), ("2", TypeError), (0, ValueError), (-1, ValueError)]
)
def test_chunks_is_a_number_of_at_least_one(chunks: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="expected"):
        scatter(torch.ones(2), chunks)
    with pytest.raises(kind, match=r"least is .*expected"):
        scatter_views(torch.ones(2), 2, least=chunks)


@pytest.mark.parametrize("value", [(), [], {}, None, (None,), {"x": []}, Replicate(torch.ones(4))])
def test_nothing_to_split(value: Any) -> None:
    with pytest.raises(ValueError, match="input has no tensor to split"):
        scatter(value, 2)


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_that_is_not_there(dim: int) -> None:
    with pytest.raises(ValueError, match=rf"input has shape \(4, 2\) and no dimension {dim} to split"):
        scatter(torch.ones(4, 2), 2, Split(dim))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.integers(1, 5))
@example([2, 7], 4)
@example([7, 2], 4)
@example([4, 4, 2], 4)
def test_mismatched_row_counts_raise(rows: list[int], most: int) -> None:
    value = {"x": torch.ones(rows[0], 3), "masks": (None, *map(torch.ones, rows[1:]))}
    counts = [count(n, most) for n in rows]
    other = next((i for i, each in enumerate(counts) if each != counts[0]), None)
    for cut in (scatter, lambda *of: scatter_views(*of)[0]):
        if other is None:
            assert len(cut(value, most)) == counts[0]
        else:
            message = (
                rf"^chunks={most} makes {counts[0]} micro-batches of input\['x'\] with shape \({rows[0]}, 3\) but "
                rf"{counts[other]} micro-batches of input\['masks'\]\[{other}\] with shape \({rows[other]},\)"
            )
            with pytest.raises(ValueError, match=message):
                cut(value, most)


class Ambiguous:
    """Like a NumPy array with several elements."""

    def __bool__(self) -> bool:
        raise ValueError("the truth value is ambiguous")


@pytest.mark.parametrize("value", [3, "text", Ambiguous()])
@pytest.mark.parametrize("cut", [scatter, scatter_views])
def test_unsupported_input_type_raises(cut: Any, value: Any) -> None:
    with pytest.raises(TypeError, match=f"input is of type {type(value).__name__}, which cannot be split"):
        cut(value, 2)
