"""Outcomes of each way to use a pipe without a sample, compared with the plain model."""

import copy
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe import Arguments, GPipe
from microbatch import flatten, leaf_paths

PACKAGES = str(Path(__file__).parents[1] / "packages")
CHUNKS, STAGES = 4, 3
CACHES = ("past_key_values", "cache_params", "mems", "past_buckets_states", "['state']")
"""Outputs that a pipe does not return, because it generates on its own."""
EQUAL, REFUSED, BARE, WRONG = "equal", "refused", "bare error", "wrong"
Loss = Callable[[Any], Tensor]


class NotComparableError(Exception):
    """The plain model fails, is not deterministic, or returns no numbers."""


class Case(NamedTuple):
    """A model and a batch.

    Attributes:
        model: the model, in training mode.
        batch: the arguments of its forward.
        loss: the loss function of the full output; None if the model computes its loss.
        bound: how far numbers may differ, relative to the largest.
        rows_apart: whether the output for a row depends on this row alone.
        in_spec: how the batch is cut.
    """

    model: nn.Module
    batch: Arguments
    loss: Loss | None = None
    bound: float = 1e-4
    rows_apart: bool = True
    in_spec: Any = None


def outcomes(case: Case) -> dict[str, str]:
    """Return the outcome of each way to use a pipe of the model: the word "equal", or a description.

    Raises:
        NotComparableError: there is nothing to compare with.
    """
    plain = copy.deepcopy(case.model)
    try:
        expect_repeatable(case, plain)
    except Exception as error:
        raise NotComparableError(f"{error!r:.300}") from error
    try:
        pipe = GPipe(case.model, devices=["cpu"] * STAGES, chunks=CHUNKS, in_spec=case.in_spec)
    except Exception as error:
        return {"made": told(error)}
    ways = {"step": step, "call": call, "evaluate": evaluate, "blocks": blocks}
    if case.rows_apart:
        ways |= {schedule: rows_apart(schedule) for schedule in ("1f1b", "zero_bubble")}
    found = {}
    for name, way in ways.items():
        for each in (case.model, plain):
            each.zero_grad()
            each.train()
            freeze_statistics(each)
        try:
            way(case, pipe, plain)
        except NotComparableError:
            continue
        except AssertionError as error:
            found[name] = f"{WRONG}: {' '.join(str(error).split()):.300}" if not _is_ours(error) else told(error)
        except Exception as error:
            found[name] = told(error)
        else:
            found[name] = EQUAL
    pipe.close()
    return found


def worst(found: Mapping[str, str]) -> str:
    """Return the gravest kind among the outcomes."""
    kinds = {text.partition(":")[0] for text in found.values()}
    return next((kind for kind in (WRONG, BARE, REFUSED) if kind in kinds), EQUAL)


# The ways to use a pipe.


def step(case: Case, pipe: GPipe, plain: nn.Module) -> None:
    loss = pipe.step(copy.deepcopy(case.batch), loss_fn=case.loss)
    expected = loss_of(case, alone(plain, case.batch))
    expected.backward()
    expect_close(loss, expected, case.bound, "loss")
    expect_gradients(case, plain)


def call(case: Case, pipe: GPipe, plain: nn.Module) -> None:
    output, expected = run(pipe, case.batch), alone(plain, case.batch)
    expect_outputs(output, expected, case.bound)
    loss_of(case, output).backward()
    loss_of(case, expected).backward()
    expect_gradients(case, plain)


def evaluate(case: Case, pipe: GPipe, plain: nn.Module) -> None:
    pipe.eval()
    plain.eval()
    with torch.no_grad():
        expected = alone(plain, case.batch)
        expect_close(
            pipe.evaluate(copy.deepcopy(case.batch), loss_fn=case.loss), loss_of(case, expected), case.bound, "loss"
        )
        expect_outputs(run(pipe, case.batch), expected, case.bound)


def blocks(case: Case, pipe: GPipe, plain: nn.Module) -> None:
    """Check that each block runs once per micro-batch, on a thread of a forward."""
    pipe.eval()
    plain.eval()
    names: list[str] = pipe.block_names
    with torch.no_grad():
        with called(plain, names) as expected:
            alone(plain, case.batch)
        with called(case.model, names) as found:
            pipe.evaluate(copy.deepcopy(case.batch), loss_fn=case.loss)
    elsewhere = {thread for _, thread in found if not thread.startswith("gpipe forward")}
    assert not elsewhere, f"blocks computed in {elsewhere}"
    once, times = (Counter(name for name, _ in each) for each in (expected, found))
    rows = next(len(each) for _, each in leaves(case.batch.kwargs or case.batch.args) if each.dim())
    parts = len(torch.arange(rows).chunk(CHUNKS))
    assert times == {name: parts * count for name, count in once.items()}, f"{once} became {times}"


def rows_apart(schedule: str) -> Callable[[Case, GPipe, nn.Module], None]:
    def way(case: Case, pipe: GPipe, plain: nn.Module) -> None:
        expected = mean_square(alone(plain, case.batch))
        if not expected.isfinite():
            return
        expected.backward()
        loss = pipe.step(copy.deepcopy(case.batch), loss_fn=mean_square, reduction="mean", schedule=schedule)
        expect_close(loss, expected, case.bound, "loss")
        expect_gradients(case, plain)

    return way


# Substrings of parameter names


def alone(plain: nn.Module, batch: Arguments) -> Any:
    """Return the output of the plain model."""
    try:
        return run(plain, batch)
    except Exception as error:
        raise NotComparableError(f"{error!r:.300}") from error


def run(model: nn.Module, batch: Arguments) -> Any:
    args, kwargs = copy.deepcopy((batch.args, batch.kwargs))  # some models change their inputs in place
    return model(*args, **kwargs)


def loss_of(case: Case, output: Any) -> Tensor:
    found: Tensor = output.loss if case.loss is None else case.loss(output)
    return found


def mean_square(output: Any) -> Tensor:
    """Return the loss of the first output tensor with one row per sample."""
    return next(leaf for _, leaf in leaves(output) if leaf.is_floating_point() and leaf.dim() > 1).square().mean()


def of_all_rows(output: Any) -> Tensor:
    """Return a loss of the first (or only) output that mixes rows."""
    first: Tensor = output if isinstance(output, Tensor) else output[0]
    return (first - first.mean(0)).square().flatten(1).sum(1).sqrt().mean() + first.square().mean()


def leaves(output: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of an output, with their names."""
    named = zip(leaf_paths(output, "output"), flatten(output)[0], strict=True)
    found = [(name, leaf) for name, leaf in named if isinstance(leaf, Tensor)]
    return [(name, leaf) for name, leaf in found if not any(cache in name for cache in CACHES)]


@contextmanager
def called(model: nn.Module, names: Iterable[str]) -> Iterator[list[tuple[str, str]]]:
    """Collect the names of blocks, and of the threads that compute them."""
    found: list[tuple[str, str]] = []
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: found.append((name, threading.current_thread().name))
        )
        for name in names
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def freeze_statistics(model: nn.Module) -> None:
    """Freeze batch norm, which depends on the full batch."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()


# Comparisons.


def expect_repeatable(case: Case, plain: nn.Module) -> None:
    twin = copy.deepcopy(plain)
    freeze_statistics(plain)
    freeze_statistics(twin)
    outputs = [run(model, case.batch) for model in (plain, twin)]
    losses = [loss_of(case, output) for output in outputs]
    for loss in losses:
        loss.backward()
    if not losses[0].isfinite():
        raise ValueError("its loss is not finite")
    expect_close(losses[1], losses[0], case.bound / 10, "loss")
    expect_outputs(outputs[1], outputs[0], case.bound / 10)
    expect_gradients(case._replace(model=twin, bound=case.bound / 10), plain)


def expect_outputs(found: Any, expected: Any, bound: float) -> None:
    assert type(found) is type(expected), f"the output is a {type(found).__name__}"
    mine, others = dict(leaves(found)), dict(leaves(expected))
    assert mine.keys() == others.keys(), f"fields {[*mine]} instead of {[*others]}"
    for name, tensor in others.items():
        assert mine[name].shape == tensor.shape, f"{name} has the shape {tuple(mine[name].shape)}, not {tensor.shape}"
        if tensor.is_floating_point():
            expect_close(mine[name], tensor, bound, name)
        else:
            assert torch.equal(mine[name], tensor), f"{name} is another one"


def expect_gradients(case: Case, plain: nn.Module) -> None:
    mine = dict(case.model.named_parameters())
    largest = max((float(p.grad.abs().max()) for p in plain.parameters() if has_gradient(p)), default=0.0)
    for name, parameter in plain.named_parameters():
        found, expected = mine[name].grad, parameter.grad
        assert (found is None) == (expected is None), f"{name}.grad is {'None' if found is None else 'not None'}"
        if found is not None and expected is not None and found.numel():
            off = float((found - expected).abs().max())
            assert off <= 10 * case.bound * largest + 1e-8, f"{name}.grad is off by {off:.1e} of {largest:.1e}"


def has_gradient(parameter: nn.Parameter) -> bool:
    return parameter.grad is not None and parameter.numel() > 0


def expect_close(found: Tensor, expected: Tensor, bound: float, name: str) -> None:
    a, b = found.detach().double(), expected.detach().double()
    assert a.shape == b.shape, f"{name} has the shape {tuple(a.shape)}, not {tuple(b.shape)}"
    torch.testing.assert_close(
        a,
        b,
        rtol=bound,
        atol=bound * max(1.0, float(b.abs().nan_to_num(0, 0, 0).max())) if b.numel() else 0.0,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


# Errors.


def told(error: BaseException) -> str:
    """Classify an error: a refusal if our own statement raises it, with a message; else a bare error."""
    text = " ".join(str(error).split())
    if _is_ours(error) and type(error) in (TypeError, ValueError, RuntimeError):
        return f"{REFUSED}: {text:.300}"
    return f"{BARE}: {type(error).__name__} {text:.300} at {_where(error)}"


def _frames(error: BaseException) -> list[Any]:
    found, at = [], error.__traceback__
    while at is not None:
        found.append(at)
        at = at.tb_next
    return found


def _is_ours(error: BaseException) -> bool:
    last = _frames(error)[-1]
    file = last.tb_frame.f_code.co_filename
    return file.startswith(PACKAGES) and linecache.getline(file, last.tb_lineno).strip().startswith("raise ")


def _where(error: BaseException) -> str:
    last = _frames(error)[-1]
    return f"{last.tb_frame.f_code.co_filename.rpartition('site-packages/')[2]}:{last.tb_lineno}"


def report(found: Mapping[str, Mapping[str, str]]) -> None:
    """Print the number of models by outcome, with details unless they are equal."""
    counts = Counter(worst(each) for each in found.values())
    sys.stdout.write(f"{dict(counts)}\n")
    for name, each in found.items():
        for way, text in each.items():
            if text != EQUAL:
                sys.stdout.write(f"{name}, {way}: {text}\n")
