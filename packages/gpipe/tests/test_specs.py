"""Inputs and outputs whose rows are not in dimension 0: described by in_spec and out_spec, or an error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import microbatch
from gpipe import GPipe
from microbatch import Arguments, Mean, Replicate, Split, Sum

from .layers import DOUBLE, MODES, Call, assert_same, each_mode, each_way, linears, piped, rows

SCHEDULES = ("1f1b", "fill_drain", "zero_bubble")

# Functions of (n, 3) for the last layer, and their out_spec. Means are over the rows.
OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "rows": (lambda x: x, None),
    "two tokens a row": (lambda x: x.sum(1).repeat_interleave(2, 0), None),
    "transposed": (lambda x: x.T, Split(1)),
    "transposed, from the end": (lambda x: x.T, Split(-1)),
    "(2, n, 3), as h_n of an LSTM": (lambda x: torch.stack([x, x * 2]), Split(1)),
    "mean": (lambda x: x.square().mean(), Mean()),
    "mean of shape (1,)": (lambda x: x.square().mean(0)[:1], Mean()),
    "sum": (lambda x: x.square().sum(), Sum()),
    "sum of matrices": (lambda x: x.T @ x, Sum()),
    "some of the rows": (lambda x: x[x[:, 0] > 0], Split(0)),
    "the same for all": (lambda x: x.new_ones(5), Replicate()),
    "a number": (lambda x: 3, Replicate()),
    "a count": (lambda x: x.shape[0], Sum()),
}


@st.composite
def outputs(draw: st.DrawFn) -> tuple[Callable[[Tensor], Any], Any]:
    """A last layer with several outputs in one container, and its out_spec."""
    names = draw(st.lists(st.sampled_from(sorted(OUTPUTS)), min_size=1, max_size=4, unique=True))
    functions = {name: OUTPUTS[name][0] for name in names}
    spec = {name: OUTPUTS[name][1] for name in reversed(names)}
    if len(names) == 1:
        return functions[names[0]], spec[names[0]]
    if draw(st.booleans()):
        return lambda x: tuple(f(x) for f in functions.values()), tuple(spec[name] for name in names)
    return lambda x: {name: f(x) for name, f in functions.items()}, spec


def total(value: Any) -> Tensor:
    """A scalar of everything that requires grad, in which no two entries count the same."""
    found = [tensor for tensor in microbatch.Batch(value) if tensor.requires_grad]
    return sum(
        ((t * torch.arange(1.0, t.numel() + 1, dtype=t.dtype).view(t.shape)).sum() for t in found), torch.zeros(())
    )


@each_way
@given(st.data())
def test_outputs_with_spec_match_plain_model(way: Any, data: st.DataObject) -> None:
    last, spec = data.draw(outputs())
    model = nn.Sequential(*linears(2), Call(last))
    mode, chunks = data.draw(st.sampled_from(MODES)), data.draw(st.integers(1, 4))
    pipe = piped(model, [1, 2], chunks=chunks, checkpoint=mode, out_spec=spec)
    x = rows(data.draw(st.integers(1, 9)))
    with way():
        found, expected = pipe(x), model(x)
        torch.testing.assert_close(found, expected)
        if total(expected).requires_grad:
            total(found).backward()
            total(expected).backward()
            assert_same(pipe, model)


class Masked(nn.Module):
    """A first layer of several arguments."""

    def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return x * mask * scale


class Gathering(nn.Module):
    """A first layer that adds to each row the pieces that belong to it."""

    def forward(self, x: Tensor, pieces: Tensor, counts: Tensor) -> Tensor:
        return x.index_add(0, torch.arange(len(x)).repeat_interleave(counts), pieces)


@each_way
@pytest.mark.parametrize("said", ["by the spec", "around the argument"])
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 4), st.sampled_from(MODES))
def test_pieces_follow_their_rows(way: Any, said: str, counts: list[int], chunks: int, mode: str) -> None:
    model = nn.Sequential(Gathering(), *linears(2))
    spec = {"pieces": Split(counts=lambda batch: batch["counts"])} if said == "by the spec" else None
    pipe = piped(nn.Sequential(*model), [2, 1], chunks=chunks, checkpoint=mode, in_spec=spec)
    x, numbers = rows(len(counts)), torch.tensor(counts)
    pieces, same = (torch.randn(sum(counts), 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(3)) for _ in "ab")
    given = {"x": x, "pieces": pieces.requires_grad_() if spec else Split(pieces.requires_grad_(), counts=counts)}
    expected = nn.functional.mse_loss(model[1:](model[0](x, same.requires_grad_(), numbers)), x)
    expected.backward()
    with way():
        loss = pipe.step(**given, counts=numbers, target=x, loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close((loss, pieces.grad), (expected.detach(), same.grad))
    assert_same(pipe, model)


def test_spec_for_omitted_keyword() -> None:
    def called(**inputs: Any) -> Tensor:
        return piped(nn.Sequential(Masked(), *linears(2)), [2, 1], chunks=3, in_spec=spec)(x=rows(7), **inputs)

    spec = {"mask": Replicate(), "scale": Replicate()}
    mask = torch.ones(3, dtype=DOUBLE)
    torch.testing.assert_close(called(mask=mask), called(mask=mask, scale=1.0))
    spec = {"masks": Replicate()}
    with pytest.raises(ValueError, match=r"rule for 'masks', which is not given; did you mean 'mask'\?"):
        called(mask=mask)


@each_mode
@each_way
@pytest.mark.parametrize("said", ["by the spec", "by the spec for the mask", "around the argument"])
def test_replicated_mask_gets_summed_gradient(mode: str, way: Any, said: str) -> None:
    model = nn.Sequential(Masked(), *linears(2))
    whole = Replicate if said == "around the argument" else (lambda each: each)
    spec: Any = {"mask": Replicate(), "scale": Replicate()} if said == "by the spec" else {"mask": Replicate()}
    spec = None if whole is Replicate else Arguments((None,), spec)
    pipe = piped(nn.Sequential(*model), [2, 1], chunks=3, checkpoint=mode, in_spec=spec)
    mask, same = (torch.arange(3, dtype=DOUBLE).requires_grad_() for _ in "ab")
    with way():
        found = pipe(rows(7), mask=whole(mask), scale=whole(2.0))
        found.square().sum().backward()
    expected = model[2](model[1](model[0](rows(7), same, 2.0)))
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    torch.testing.assert_close(mask.grad, same.grad)
    assert_same(pipe, model)


def test_replicated_list_may_have_any_length() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor, names: list[str], scale: int) -> Tensor:
            return x * len(names) * scale

    pipe = piped(nn.Sequential(Named(), *linears(2)), [2, 1], chunks=3, in_spec={"names": Replicate()})
    torch.testing.assert_close(pipe(x=rows(7), names=["a"] * 7, scale=2), pipe[1:](rows(7) * 14))


@each_mode
@each_way
@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.parametrize("dim", [1, -2])
def test_uneven_rows_are_weighted_by_their_number(mode: str, way: Any, schedule: str | None, dim: int) -> None:
    model, loss_fn = linears(), nn.functional.mse_loss
    pipe = piped(model, [1, 2], chunks=4, checkpoint=mode, in_spec=Split(dim), out_spec=Split(dim))
    x, same, y = (torch.randn(2, 7, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4))
    expected = model(same.requires_grad_())
    options: Any = {"loss_fn": loss_fn, "schedule": schedule, "return_outputs": True}
    with way():
        if schedule is not None:
            loss, found = pipe.step(x.requires_grad_(), Split(y, dim=dim), **options)
        else:
            found = pipe(x.requires_grad_())
            loss = loss_fn(found, y)
            loss.backward()
    loss_fn(expected, y).backward()
    torch.testing.assert_close((loss, found, x.grad), (loss_fn(expected, y), expected, same.grad))
    assert_same(pipe, model)


def test_replicated_first_tensor_does_not_affect_weights() -> None:
    model = nn.Sequential(Call(lambda pair: pair[1] * pair[0]), *linears(2))
    pipe = piped(model, [1, 2], chunks=4)
    scale, same = (torch.arange(3, dtype=DOUBLE).requires_grad_() for _ in "ab")
    arrived: list[Tensor] = []
    scale.register_hook(arrived.append)
    loss_fn = nn.functional.mse_loss
    pipe.step((Replicate(scale), rows(7)), rows(7), loss_fn=loss_fn)
    loss_fn(model((same, rows(7))), rows(7)).backward()
    assert_same(pipe, model)
    torch.testing.assert_close((scale.grad, arrived), (same.grad, [same.grad]))


@pytest.mark.parametrize("whole", [3.0, torch.ones(3, dtype=DOUBLE), {"weight": torch.ones(3), "power": 2}])
def test_a_target_may_be_one_for_all_rows(whole: Any) -> None:
    pipe, seen = piped(linears(), [1, 2], chunks=4), []
    loss_fn = lambda output, target: (seen.append(target), output.square().mean())[1]  # noqa: E731
    for reduction, times in (("mean", 4), (None, 1)):
        given = {"loss_fn": loss_fn, "reduction": reduction}
        losses = [step(rows(7), Replicate(whole), **given) for step in (pipe.step, pipe.evaluate)]
        torch.testing.assert_close((losses[0], seen), (losses[1], [whole] * 2 * times))
        seen.clear()


# Functions of (n, 3) whose output looks like rows but has none, if n > 1.
ROWLESS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a loss of shape (1,)": (lambda x: (x, x.mean().reshape(1)), r"output\[1\]"),
    "transposed": (lambda x: x.T, "output"),
    "h_n": (lambda x: {"y": x, "h": x[None]}, r"output\['h'\]"),
    "a row too few": (lambda x: x[1:], "output"),
    "(4, n), a multiple of the rows": (lambda x: x[:, :1].T.repeat(4, 1), "output"),
}


@each_mode
@each_way
@pytest.mark.parametrize("name", ROWLESS)
def test_what_does_not_follow_the_rows(mode: str, way: Any, name: str) -> None:
    last, path = ROWLESS[name]
    model = nn.Sequential(*linears(2), Call(last))
    pipe = piped(model, [1, 2], chunks=2, checkpoint=mode)
    why = rf"^{path} (has its rows|does not have one row per sample).*: the micro-batches have \[2, 2\], .* spec"
    with way(), pytest.raises(ValueError, match=why):
        pipe(rows(4))
    assert all(parameter.grad is None for parameter in pipe.parameters())
    torch.testing.assert_close(piped(model, [1, 2], chunks=1)(rows(4)), model(rows(4)))  # nothing is joined


def test_failed_output_join_explains_gradients() -> None:
    pipe = piped(nn.Sequential(*linears(2), Call(lambda x: x.T)), [1, 2], chunks=2)
    with pytest.raises(ValueError, match="output has its rows on dimension 1, not 0") as caught:
        pipe.step(rows(4), loss_fn=lambda output, _: output.sum(), reduction="sum", return_outputs=True)
    assert "its gradients are in .grad" in "".join(caught.value.__notes__)
    assert pipe.step(rows(4), loss_fn=lambda output, _: output.sum(), reduction="sum").dim() == 0
    with pytest.raises(ValueError, match="output has its rows on dimension 1, not 0"):
        pipe.step(rows(4), loss_fn=lambda output, _: output.sum())


def test_ambiguous_dimension_is_treated_as_rows() -> None:
    """Two layers of h_n in micro-batches of two rows look like two rows each; out_spec says what they are."""
    model = nn.Sequential(Call(lambda x: torch.stack([x, x * 2])))
    x = rows(4)
    assert piped(copy.deepcopy(model), [1], chunks=2)(x).shape == (4, 2, 3)
    told = GPipe(model, [1], devices=["cpu"], chunks=2, out_spec=Split(1))
    torch.testing.assert_close(told(x), torch.stack([x, x * 2]))
