"""Each micro-batch has one forward, on its own thread, that stops where the next stage begins."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipe import Arguments, GPipe
from gpipe.model import _pipeline

from ..layers import MODES, assert_same, counted, each_way, on_backward, rows, within
from ..schedules import suited
from .forwards import Block, Told, models
from .residuals import Residuals, forward_threads, is_first, of_function, plain_of, residuals, two_stages
from .test_pipe import SCHEDULES, Way, allowing_out_of_order, batches, expected_of, stepped, ways

each_mode = pytest.mark.parametrize("mode", MODES)
HOWS = ("call", "whole", "1f1b", "evaluate")
each_how = pytest.mark.parametrize("how", HOWS)


def done(pipe: GPipe, x: Tensor, how: str) -> Any:
    if how == "call":
        return pipe(x).square().sum().backward()
    if how == "evaluate":
        return pipe.evaluate(x, loss_fn=counted)
    if how == "whole":
        return pipe.step(x, loss_fn=lambda output: output.square().sum())
    return pipe.step(x, loss_fn=lambda output: output.square().sum(), reduction="sum", schedule=how)


def microbatches(rows: int, chunks: int) -> int:
    return len(torch.empty(rows).chunk(chunks))


@given(models(in_place=False), ways)
def test_blocks_run_once_off_the_caller_thread(told: Told, way: Way):
    model, plain = told.model(), told.model()
    names = {module: name for name, module in model.named_modules()}
    with allowing_out_of_order(told), closing(way.pipe(model)) as pipe:
        for batch in batches(way):
            for block in (*model.blocks(), *plain.blocks()):
                block.noted().clear()
            if expected_of(plain, batch, way) is None:
                return
            stepped(pipe, batch, way)
            count = microbatches(len(batch["x"]), way.chunks)
            for block, own in zip(model.blocks(), plain.blocks(), strict=True):
                if names[block] not in pipe.block_names:  # a list of one element has none
                    continue
                assert len(block.noted()) == count * len(own.noted())
                assert sum(call.rows for call in block.noted()) == len(batch["x"]) * len(own.noted())
                assert all(call.thread.startswith("gpipe forward") for call in block.noted())


@given(models(in_place=False), ways)
def test_buffers_count_as_in_a_loop_over_microbatches(told: Told, way: Way) -> None:
    """Computations between blocks are repeated for the full batch; the last steps are skipped in that case."""
    model = told.model()
    plain = told.model()
    with allowing_out_of_order(told), closing(way.pipe(model)) as pipe:
        for batch in batches(way):
            if expected_of(plain, batch, way) is None:
                return
            before, count = model.calls.item(), microbatches(len(batch["x"]), way.chunks)
            stepped(pipe, batch, way)
            statements = [name for name, _, _ in told.statements]
            counts = model.calls.item() - before
            replays = way.how == "call" or (way.how != "call with out_spec" and way.loss in ("whole", "own"))
            most = (count + replays) * statements.count("counted")
            assert counts <= most
            assert replays or counts == most
        for name, block in model.named_modules():
            if isinstance(block, Block) and name in pipe.block_names:
                assert block.seen == plain.get_submodule(name).seen


@each_how
@each_mode
def test_end_runs_once_on_full_batch(how: str, mode: str):
    model, seen = residuals(), []
    model.end = lambda output: seen.append(len(output))
    with closing(two_stages(model, checkpoint=mode)) as pipe:
        for _ in range(3):
            done(pipe, rows(6), how)
    own = [2, 2, 2]
    assert seen == (own * 3 if how in ("1f1b", "evaluate") else [*own, 6, 6, 6])


@pytest.mark.parametrize("schedule", SCHEDULES)
@each_way
def test_layers_draw_as_in_any_other_division(schedule: str, way: Callable[[], Any]) -> None:
    found = []
    for stages, mode in [(1, "never"), (2, "always"), (4, "except_last")]:
        model = of_function(lambda s, x: nn.functional.dropout(s.m[0](x), 0.4))
        model.between = lambda k, x: nn.functional.dropout(x, 0.1)
        devices = (
            [f"cpu:{j % max(1, stages // 2)}" for j in range(stages)] if schedule == "interleaved" else ["cpu"] * stages
        )
        with closing(GPipe(model, devices=devices, chunks=3, checkpoint=mode)) as pipe, way():
            torch.manual_seed(5)
            done(pipe, rows(6), suited(schedule, pipe))
            found.append([parameter.grad for parameter in pipe.parameters()])
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-12, atol=1e-12)


class PlannedError(Exception):
    pass


def failing_at(where: str, phase: str, microbatch: int) -> Residuals:
    """A model that fails in its third block, before it, or at its end; in the forward or backward of a micro-batch."""
    seen = {"forward": 0, "backward": 0}

    def fail(kind: str) -> None:
        seen[kind] += 1
        if phase == kind and seen[kind] == microbatch + 1 and model.fails:
            raise PlannedError(where)

    def at(x: Tensor) -> Tensor:
        if not is_first():
            return x
        fail("forward")
        return on_backward(x, lambda: fail("backward"))

    def block(s: Any, x: Tensor) -> Tensor:
        return s.m[0](at(x) if where == "block" and s.k == 2 else x)

    model = of_function(block)
    if where == "between":
        model.between = lambda k, x: at(x) if k == 2 else x
    if where == "end":
        model.end = lambda x: at(x) and None if phase == "forward" else None
    model.fails = True
    return model


@pytest.mark.parametrize("where", ["block", "between"])
@pytest.mark.parametrize("how", ["1f1b", "fill_drain", "whole", "call"])
@each_way
def test_error_names_place_and_pipe_stays_usable(where: str, how: str, way: Callable[[], Any]) -> None:
    model = failing_at(where, "forward", 1)
    with closing(two_stages(model)) as pipe, way():
        with pytest.raises(PlannedError) as caught:
            within(20, lambda: done(pipe, rows(6), how))
        noted = "".join(caught.value.__notes__)
        assert "partition 1" in noted
        assert "micro-batch 1 of 3, forward" in noted
        assert all(parameter.grad is None for parameter in pipe.parameters())
        model.fails = False
        done(pipe, rows(6), how)
        plain = plain_of(pipe)
        plain.zero_grad()
        plain(rows(6)).square().sum().backward()
        assert_same(pipe, plain)


def test_failed_forward_leaves_no_waiting_thread() -> None:
    model = failing_at("block", "forward", 1)
    pipe = two_stages(model)
    with pytest.raises(PlannedError):
        done(pipe, rows(6), "fill_drain")
    assert not parked()
    pipe.close()
    assert not pipe._pipeline.threads._pool


def parked() -> list[str]:
    """The threads of forwards that are in a model."""

    frames = sys._current_frames()
    found = []
    for thread in forward_threads():
        frame = frames.get(thread.ident)
        while frame is not None:
            if frame.f_code.co_name == "_compute":
                found.append(thread.name)
            frame = frame.f_back
    return found


def test_model_cannot_continue_ended_forward() -> None:
    """It catches everything, even the end of the forward, and keeps calling blocks."""
    model = residuals()
    calls = []

    def caught(k: int, x: Tensor) -> Tensor:
        if k != 1:
            return x
        try:
            return x + model.layers[3](x)
        except BaseException:
            calls.append(1)
            return x

    model.between = caught
    model.layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(PlannedError()))
    pipe = two_stages(model)
    with pytest.raises(PlannedError):
        within(20, lambda: done(pipe, rows(6), "1f1b"))
    assert not parked()
    pipe.close()


class Forgiving(Residuals):
    """Goes on after anything that ends it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            try:
                x = x + layer(x).tanh()
            except BaseException:
                x = x * 100
        self.end(x)
        return self.head(x)


@pytest.mark.parametrize("fails", [False, True])
@each_how
def test_model_catching_everything_is_ended(how: str, fails: bool) -> None:
    model, x = Forgiving(*residuals().layers), rows(6)

    def end(x: Tensor) -> None:
        if fails and x.abs().max() > 50:
            raise PlannedError

    model.end = end
    with closing(two_stages(model)) as pipe:
        plain = plain_of(pipe)
        plain(x).square().sum().backward()
        for _ in range(3):
            model.zero_grad()
            done(pipe, x, how)
    if how != "evaluate":
        assert_same(model, plain)


def test_an_interrupt_of_the_caller_ends_the_forwards() -> None:

    model, once = residuals(), [1]

    def interrupt(k: int, x: Tensor) -> None:
        if k == 2 and once:
            once.clear()
            os.kill(os.getpid(), signal.SIGINT)

    model.between = interrupt
    with closing(two_stages(model)) as pipe:
        with pytest.raises(KeyboardInterrupt):
            done(pipe, rows(6), "1f1b")
        assert not parked()
        pipe.zero_grad()
        done(pipe, rows(6), "1f1b")
        plain = plain_of(pipe)
        plain.zero_grad()
        plain(rows(6)).square().sum().backward()
        assert_same(pipe, plain)


@pytest.mark.parametrize("how", ["call", "whole"])
def test_cache_of_argument_kinds_is_limited(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pipeline, "_MOST", 4)
    model = residuals()
    model.forward = lambda x, scale: Residuals.forward(model, x) * scale
    with closing(two_stages(model)) as pipe:
        for k in range(20):
            x = Arguments((rows(6), float(k)), {})
            done(pipe, x, how) if how == "whole" else pipe(*x.args)
            assert len(pipe._pipeline._known) <= 4


@each_how
@each_way
@pytest.mark.usefixtures("no_collector")
def test_nothing_of_a_run_survives_it(how: str, way: Callable[[], Any]) -> None:
    model, alive = residuals(), []
    model.between = lambda k, x: alive.append(ref(x))
    model.layers[3].register_forward_hook(lambda m, args, output: alive.append(ref(output)) and None)
    with closing(two_stages(model, checkpoint="never")) as pipe, way():
        for _ in range(2):
            done(pipe, rows(6), how)
            assert alive
            assert not [each for each in alive if each() is not None]


@pytest.mark.parametrize("options", [{}, {"reduction": "mean"}, {"return_outputs": True}])
@pytest.mark.usefixtures("no_collector")
def test_inputs_of_a_step_are_freed(options: dict[str, Any]) -> None:
    x, target = rows(6), rows(6)
    alive = [ref(x), ref(target)]
    with closing(two_stages(residuals())) as pipe:
        pipe.step(x, {"target": target}, loss_fn=lambda y, each: (y - each["target"]).square().mean(), **options)
        del x, target
        assert not [each for each in alive if each() is not None]


@pytest.mark.usefixtures("no_collector")
def test_nothing_of_a_failed_run_survives_its_error() -> None:
    model, alive = failing_at("between", "forward", 1), []
    own = model.between
    model.between = lambda k, x: (alive.append(ref(x)), own(k, x))[1]
    with closing(two_stages(model, checkpoint="never")) as pipe:
        with pytest.raises(PlannedError):
            done(pipe, rows(6), "fill_drain")
        assert not [each for each in alive if each() is not None]


@pytest.mark.usefixtures("no_collector")
def test_threads_end_with_the_pipe_and_with_close() -> None:
    pipe = two_stages(residuals())
    before = forward_threads()
    done(pipe, rows(6), "call")
    own = forward_threads() - before
    assert own
    pipe.close()
    assert not any(thread.is_alive() for thread in own)
    done(pipe, rows(6), "call")
    own = forward_threads() - before
    assert own
    del pipe
    for thread in own:
        thread.join(20)
        assert not thread.is_alive()


def test_threads_are_kept_between_runs() -> None:
    with closing(two_stages(residuals())) as pipe:
        before = forward_threads()
        for _ in range(5):
            done(pipe, rows(6), "1f1b")
        assert len(forward_threads() - before) <= 3


def test_tensor_with_grad_stored_by_block_raises() -> None:
    def leave(s: Any, x: Tensor) -> Tensor:
        s.left = s.m[0](x)
        return s.left * 1

    model = of_function(leave)
    model.between = lambda k, x: x + model.layers[0].left if k == 2 else x
    with (
        closing(two_stages(model)) as pipe,
        pytest.raises(RuntimeError, match=r"Residuals reads layers\.0\.left, where a block has left a tensor"),
    ):
        done(pipe, rows(6), "1f1b")


def test_detached_tensor_stored_by_block_is_allowed() -> None:
    def leave(s: Any, x: Tensor) -> Tensor:
        s.left = x.detach()
        return s.m[0](x)

    with closing(two_stages(of_function(leave))) as pipe:
        done(pipe, rows(6), "1f1b")
        plain = plain_of(pipe)
        plain.zero_grad()
        plain(rows(6)).square().sum().backward()
        assert_same(pipe, plain)


@each_mode
def test_hooks_of_blocks_see_each_microbatch_once(mode: str) -> None:
    model, seen = residuals(), []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, args: (is_first() and seen.append("before")) or None)
        layer.register_forward_hook(lambda m, args, output: (is_first() and seen.append("after")) or None)
        layer.register_full_backward_hook(lambda m, given, got: seen.append("backward"))
    with closing(two_stages(model, checkpoint="never")) as pipe:
        done(pipe, rows(6), "1f1b")
    assert {kind: seen.count(kind) for kind in seen} == {"before": 12, "after": 12, "backward": 12}


@pytest.mark.parametrize("grad", [True, False])
@each_mode
def test_forward_uses_settings_of_caller(grad: bool, mode: str) -> None:
    model, seen = residuals(), []
    model.between = lambda k, x: seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
    with closing(two_stages(model)) as pipe, torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        pipe(rows(6))
    assert {*seen} == {(grad, True)}


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.sampled_from(MODES))
def test_chains_of_any_size_train_like_model(blocks: int, count: int, chunks: int, mode: str) -> None:
    pipe = GPipe(residuals(blocks), devices=["cpu"] * 3, chunks=chunks, checkpoint=mode)
    with closing(pipe):
        done(pipe, rows(count), "1f1b")
        plain = plain_of(pipe)
        plain.zero_grad()
        plain(rows(count)).square().sum().backward()
        assert_same(pipe, plain)
