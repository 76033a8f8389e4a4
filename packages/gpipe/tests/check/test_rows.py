"""An error gives both row counts if target and input differ in them. Replicated values are exempt."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers import Call, assert_same, linears, piped, rows, running


@given(st.integers(1, 7), st.integers(0, 7), st.integers(1, 5), st.sampled_from(["1f1b", "fill_drain"]), st.booleans())
@example(4, 3, 2, "1f1b", False)
@example(6, 5, 3, "1f1b", True)
def test_row_counts_match_plain_model_or_raise(
    count: int, others: int, chunks: int, schedule: str, inlined: bool
) -> None:
    model, x, y = linears(), rows(count), rows(others)
    pipe, given = piped(model, [1, 2], chunks=chunks), {"loss_fn": F.mse_loss, "reduction": "mean"}
    with running(inlined):
        if count != others:
            with pytest.raises(ValueError, match=rf"target has {others} rows .*, but the input has {count} rows "):
                pipe.step(x, y, **given, schedule=schedule)
            assert all(parameter.grad is None for parameter in pipe.parameters())
            return
        loss = pipe.step(x, y, **given, schedule=schedule)
    expected = F.mse_loss(model(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    assert_same(pipe, model)


@pytest.mark.parametrize(("count", "allowed"), [(2, True), (4, True), (6, True), (3, False), (8, False)])
def test_target_matches_one_tensor_of_input(count: int, allowed: bool) -> None:
    pipe = piped(nn.Sequential(Call(lambda values: values[0]), *linears()), [2, 2], chunks=2)
    seen: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(len(target))
        return output.sum()

    inputs = (rows(4), rows(2), rows(6))
    if allowed:
        pipe.step(inputs, rows(count), loss_fn=loss, reduction="sum")
        assert seen == [count // 2] * 2
    else:
        with pytest.raises(ValueError, match=rf"target has {count} rows .*, but the input has 4 and 2 and 6 rows "):
            pipe.step(inputs, rows(count), loss_fn=loss, reduction="sum")
    pipe.step(inputs, rows(count), loss_fn=loss)
    assert seen[-1] == count  # a full-batch loss gets the full target, with any number of rows


def tokens_of_samples(samples: Tensor, tokens: Tensor) -> Tensor:
    return samples * tokens.view(len(samples), -1, tokens.shape[1]).sum(1)


@given(st.integers(1, 12), st.integers(1, 3), st.integers(1, 5), st.booleans(), st.booleans())
@example(10, 2, 4, False, False)
@example(10, 2, 4, True, True)
def test_tokens_are_split_like_their_samples(
    count: int, tokens: int, chunks: int, swapped: bool, inlined: bool
) -> None:
    inputs = rows(count), rows(count * tokens)
    if swapped:
        inputs = inputs[::-1]
    layer = Call(lambda pair: tokens_of_samples(*(pair[::-1] if swapped else pair)))
    pipe = piped(nn.Sequential(layer, *linears()), [2, 2], chunks=chunks)
    cuts = [[len(part) for part in each.chunk(chunks)] for each in inputs]
    with running(inlined):
        if sorted(cuts)[1] == [tokens * own for own in sorted(cuts)[0]]:
            torch.testing.assert_close(pipe(inputs), pipe[:](inputs))
        else:
            with pytest.raises(ValueError, match=r"cannot be split at the same samples|must give the same number"):
                pipe(inputs)


def test_mismatched_weight_is_not_split() -> None:
    pipe = piped(nn.Sequential(Call(lambda pair: pair[0] * pair[1]), *linears()), [2, 2], chunks=4)
    x, weight = rows(10), rows(4)[:, 0]
    with pytest.raises(ValueError, match=r"10 and 4 rows \(in micro-batches of 3, 3, 3, 1 and 1, 1, 1, 1\).*Replicate"):
        pipe((x, weight))
