"""Tests on GPUs: the same results for any placement, and no race between streams.

Everything runs on one device as well; where there are two, the pipes use both.
"""

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import gpipe
from gpipe import GPipe, LossSum

from .layers import MODES, Call, each_mode, on_backward, running, within

pytestmark = [pytest.mark.cuda]

LONG = 50_000_000
"""Clock ticks: tens of milliseconds, very much longer than any launch."""


def gpu(k: int = 0) -> torch.device:
    """The k-th GPU, or the last one there is."""
    return torch.device("cuda", min(k, torch.cuda.device_count() - 1))


PLACEMENTS: dict[str, tuple[int | None, ...]] = {
    "one GPU": (0, 0, 0),
    "two GPUs": (0, 1, 0),
    "CPU first": (None, 0, 0),
    "CPU last": (0, 0, None),
    "CPU between": (0, None, 1),
    "GPU between": (None, 0, None),
}


def devices(name: str) -> list[torch.device]:
    return [torch.device("cpu") if k is None else gpu(k) for k in PLACEMENTS[name]]


def cut(name: str, schedule: str | None, layers: int = 6) -> tuple[list[torch.device], list[int]]:
    """Return devices and balance; "interleaved" cycles through the devices."""
    places = devices(name)
    if schedule == "interleaved":
        places = [torch.device(place.type, place.index or 0) for place in dict.fromkeys(places)] * 2
    return places, [layers // len(places) + (k < layers % len(places)) for k in range(len(places))]


class Sleep(nn.Module):
    """The identity after keeping its stream busy for a while, so that a missing wait shows as a wrong read."""

    def __init__(self, backward: bool = False) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        nap(x.device)
        y = x * 1
        return on_backward(y, lambda: nap(x.device)) if self.backward else y


def nap(device: torch.device) -> None:
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(LONG)


def model(layers: int = 6, width: int = 16) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Linear(width, width, dtype=torch.float64) if k % 2 == 0 else nn.Tanh() for k in range(layers))
        )


def rows(count: int = 8, width: int = 16) -> Tensor:
    return torch.randn(count, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained(module: nn.Module, x: Tensor, target: torch.device) -> list[Tensor]:
    """Output and all gradients, on the CPU."""
    leaf = x.detach().requires_grad_()
    module.zero_grad()
    output = module(leaf)
    assert output.device == target
    output.square().sum().backward()
    return [t.detach().cpu() for t in (output, leaf.grad, *[p.grad for p in module.parameters()])]


def ran(work: Callable[[], Any], inline: bool) -> Any:
    """Return the result of ``work``, inline, or with workers and a time limit."""
    with running(inline):
        return work() if inline else within(60, work)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=6),
    st.integers(1, 6),
    st.sampled_from(MODES),
    st.integers(1, 9),
    st.booleans(),
)
def test_parity_on_any_placement(places: list[int | None], chunks: int, mode: str, count: int, inline: bool):
    plain = model(2 * len(places))
    on = [torch.device("cpu") if k is None else gpu(k) for k in places]
    pipe = GPipe(copy.deepcopy(plain), [2] * len(places), devices=on, chunks=chunks, checkpoint=mode)
    expected = trained(plain, rows(count), torch.device("cpu"))
    for x in (rows(count), rows(count).to(on[0])):
        torch.testing.assert_close(ran(partial(trained, pipe, x, on[-1]), inline), expected)
    pipe.close()


@each_mode
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("backward", [False, True])
def test_nobody_reads_before_it_is_written(name: str, mode: str, backward: bool):
    """Each stage in turn is the slow one."""
    plain, places = model(), devices(name)
    expected = trained(plain, rows(), torch.device("cpu"))
    for slow in range(3):
        layers = list(copy.deepcopy(plain))
        layers.insert(2 * slow + 1, Sleep(backward))
        balance = [3 if j == slow else 2 for j in range(3)]
        pipe = GPipe(nn.Sequential(*layers), balance, devices=places, chunks=3, checkpoint=mode)
        found = within(60, lambda pipe=pipe: trained(pipe, rows(), places[-1]))
        torch.testing.assert_close(found, expected)


@each_mode
@pytest.mark.parametrize("name", PLACEMENTS)
def test_caller_s_own_streams(name: str, mode: str):
    """The forward and the backward are on different streams, ordered with earlier and later work on both."""
    plain, places = model(), devices(name)
    pipe = GPipe(copy.deepcopy(plain), [2, 2, 2], devices=places, chunks=3, checkpoint=mode)
    expected = trained(plain, rows(), torch.device("cpu"))
    host = rows().pin_memory()
    forth, back = torch.cuda.Stream(gpu()), torch.cuda.Stream(gpu())
    for _ in range(3):
        pipe.zero_grad()
        torch.cuda.synchronize()
        with torch.cuda.stream(forth):
            torch.cuda._sleep(LONG)
            # on the CPU it would be the host tensor itself, whose .grad accumulates
            leaf = host.to(places[0], non_blocking=True).detach().requires_grad_()
            output = pipe(leaf)
            total = output.square().sum()
            shown = output.detach() * 1
        back.wait_stream(forth)
        with torch.cuda.stream(back):
            torch.cuda._sleep(LONG)
            total.backward()
            gradients = [p.grad * 1 for p in pipe.parameters()]
        torch.cuda.synchronize()
        found = [t.detach().cpu() for t in (shown, leaf.grad, *gradients)]
        torch.testing.assert_close(found, expected)


def test_pinned_input_may_change_after_call():
    """The first stage may be on the CPU and return its input."""
    pipe = GPipe(nn.Sequential(nn.Identity(), nn.Tanh()), [1, 1], devices=["cpu", gpu()], chunks=2)
    x = rows(1 << 20).pin_memory()
    last = x[-1000:]
    expected = last.tanh()
    with torch.no_grad():
        pipe(x)
        torch.cuda.synchronize()
        output = pipe(x)  # 128 MiB: the host is back before a copy of the last rows would be done
    last.zero_()
    torch.testing.assert_close(output[-1000:].cpu(), expected)


@each_mode
@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_deadlock_in_a_backward(name: str, mode: str):
    """Neither on the device's own autograd thread, nor inside a backward that runs there."""
    places = devices(name)
    inner = GPipe(model(), [2, 2, 2], devices=places, chunks=3, checkpoint=mode)
    last = places[-1]

    class Reentrant(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                inner(leaf).square().sum().backward()
            return gradient * 2 + leaf.grad.to(gradient.device)

    x = rows().to(last).requires_grad_()
    within(60, lambda: Reentrant.apply(x * 1).sum().backward())
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


@each_mode
@pytest.mark.parametrize("name", ["one GPU", "two GPUs", "CPU between", "GPU between"])
def test_block_is_not_reused_while_read(name: str, mode: str):
    """Layers and the caller take and spoil whatever memory is free; a copy that still read it would differ."""
    plain, places = model(width=64), devices(name)
    x = rows(12, 64)
    expected = trained(plain, x, torch.device("cpu"))
    pipe = GPipe(copy.deepcopy(plain), [2, 2, 2], devices=places, chunks=4, checkpoint=mode)
    pipe[1].register_forward_hook(lambda _, args, output: spoil(output))
    pipe[3].register_forward_hook(lambda _, args, output: spoil(output))
    for _ in range(60):
        found = trained(pipe, x.to(places[0]), places[-1])
        torch.testing.assert_close(found, expected)
        for device in {d for d in places if d.type == "cuda"}:
            spoil(torch.empty(3, 64, dtype=torch.float64, device=device))


def spoil(like: Tensor) -> None:
    """Take blocks of the sizes in use and fill them, on the current stream, without waiting."""
    if like.is_cuda:
        for _ in range(4):
            torch.empty_like(like).fill_(float("nan"))
            torch.empty(12, 64, dtype=like.dtype, device=like.device).fill_(float("nan"))


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("make", [nn.Dropout, lambda: nn.TransformerEncoderLayer(16, 2, 16, 0.5, batch_first=True)])
def test_random_numbers(name: str, make: Callable[[], nn.Module]):
    """The same seed gives the same numbers and generator states in every mode, and recomputation repeats them."""
    results = []
    for mode in MODES:
        torch.manual_seed(0)
        layers = [make(), nn.Linear(16, 16), make()]
        pipe = GPipe(nn.Sequential(*layers), [1, 1, 1], devices=devices(name), chunks=3, checkpoint=mode)
        x = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(1))
        lives = []
        torch.manual_seed(1)
        for _ in range(2):
            lives += trained(pipe, x, devices(name)[-1])
        lives.append(torch.rand(3, device=gpu()).cpu())
        results.append(lives)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)


def of_ones(pipe: GPipe) -> tuple[Tensor, Tensor]:
    """The output for an input of ones, and the gradient there: equal, if a pipe only multiplies by random numbers."""
    x = torch.ones(8, 64, device=gpu(), requires_grad=True)
    output = pipe(x)
    output.sum().backward()
    return output.to(gpu()), x.grad


@each_mode
def test_recomputation_restores_generator(mode: str):
    pipe = GPipe(nn.Sequential(nn.Dropout()), [1], devices=[gpu()], chunks=2, checkpoint=mode)
    output = pipe(torch.ones(8, 64, device=gpu(), requires_grad=True))
    before = torch.cuda.get_rng_state(gpu())
    output.sum().backward()
    assert torch.equal(torch.cuda.get_rng_state(gpu()), before)


@each_mode
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_generator_of_a_layer_that_starts_to_draw(mode: str, place: str):
    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator(place).manual_seed(1)
            self.begun = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2 * self.begun):
                x = x * torch.rand(x.shape, generator=self.generator, device=place).to(x.device)
            return x * 1

    layer = Noise()
    pipe = GPipe(nn.Sequential(layer), [1], devices=[gpu()], chunks=4, checkpoint=mode)
    for layer.begun in (False, False, True, True):
        torch.testing.assert_close(*of_ones(pipe))


@each_mode
def test_cpu_random_numbers_in_gpu_stage(mode: str):
    """Like layer drop: the first cell that uses the generator saves its graph, and later ones are checked."""
    runs = {"begun": False}

    def drop(x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(()).item() if runs["begun"] else 1.0)

    pipe = GPipe(nn.Sequential(Call(drop)), [1], devices=[gpu()], chunks=4, checkpoint=mode)
    for runs["begun"] in (False, False, True, True):
        assert torch.equal(*of_ones(pipe))


@each_mode
@pytest.mark.parametrize("name", ["one GPU", "two GPUs"])
def test_autocast(name: str, mode: str):
    places = devices(name)
    pipe = GPipe(model().float(), [2, 2, 2], devices=places, chunks=2, checkpoint=mode)
    plain = model().float().to(gpu())
    x = rows().float()
    with torch.autocast("cuda", torch.bfloat16):
        output, expected = pipe(x), plain(x.to(gpu()))
    torch.testing.assert_close(output.float().cpu(), expected.float().cpu(), rtol=0.05, atol=0.05)
    output.float().sum().backward()
    assert all(p.grad is not None for p in pipe.parameters())


def test_error_on_a_gpu_leaves_the_pipe_usable():
    plain = model()
    pipe = GPipe(copy.deepcopy(plain), [2, 2, 2], devices=devices("two GPUs"), chunks=3)
    handle = pipe[2].register_forward_hook(lambda *args: torch.empty(1 << 50, device=gpu()))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipe(rows())
    handle.remove()
    assert any("partition 1" in note for note in caught.value.__notes__)
    expected = trained(plain, rows(), torch.device("cpu"))
    torch.testing.assert_close(within(60, lambda: trained(pipe, rows(), gpu())), expected)


@each_mode
def test_memory_is_flat(mode: str):
    pipe = GPipe(model(), [2, 2, 2], devices=devices("one GPU"), chunks=3, checkpoint=mode)
    gc.collect()  # what earlier tests have left
    used = []
    for _ in range(50):
        trained(pipe, rows().to(gpu()), gpu())
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated(gpu()))
    assert len(set(used[5:])) == 1


SCHEDULES = ("fill_drain", "1f1b", "interleaved", "zero_bubble")


def counted(output: Tensor, target: Tensor) -> LossSum:
    """The sum of the losses of rows that count, and their number, which only the device knows."""
    counts = target > 0
    return LossSum((output.sum(1).square() * counts).sum(), counts.sum())


def divided(output: Tensor, target: Tensor) -> Tensor:
    """Return the same loss without a declared reduction, so that it is computed once, on the full batch."""
    total, count = counted(output, target)
    return total / count


def padded(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


PADDED = partial(F.cross_entropy, ignore_index=0)
"""The same loss, recognized as torch's."""


def stepped(pipe: GPipe, x: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    """Loss and all gradients of a step, on the CPU."""
    leaf = x.detach().requires_grad_()
    pipe.zero_grad()
    loss = pipe.step(leaf, target, **options)
    return [t.detach().cpu() for t in (loss, leaf.grad, *[p.grad for p in pipe.parameters()])]


def of_the_plain_model(plain: nn.Module, x: Tensor, target: Tensor, loss_fn: Any = divided) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    plain.zero_grad()
    loss = loss_fn(plain(leaf), target)
    loss.backward()
    return [loss.detach(), leaf.grad, *[p.grad for p in plain.parameters()]]


@each_mode
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("inline", [False, True])
def test_a_step_whose_losses_are_counted(name: str, schedule: str, mode: str, inline: bool):
    plain, (places, balance) = model(), cut(name, schedule)
    target = torch.arange(8) % 3
    expected = of_the_plain_model(plain, rows(), target)
    pipe = GPipe(copy.deepcopy(plain), balance, devices=places, chunks=3, checkpoint=mode)
    for source in (torch.device("cpu"), places[0]):
        x, y = rows().to(source), target.to(places[-1])
        found = ran(partial(stepped, pipe, x, y, loss_fn=counted, schedule=schedule), inline)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_step_has_no_race_with_slow_stage(name: str, schedule: str):
    """Each stage in turn is the slow one, forwards and backwards."""
    plain, (places, balance) = model(), cut(name, schedule)
    target = torch.arange(8) % 3
    expected = of_the_plain_model(plain, rows(), target)
    for slow in range(len(places)):
        layers = list(copy.deepcopy(plain))
        layers.insert(sum(balance[:slow]) + 1, Sleep(backward=True))
        lengths = [length + (j == slow) for j, length in enumerate(balance)]
        pipe = GPipe(nn.Sequential(*layers), lengths, devices=places, chunks=3)
        work = partial(stepped, pipe, rows(), target.to(places[-1]), loss_fn=counted, schedule=schedule)
        torch.testing.assert_close(within(60, work), expected)


@each_mode
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize(("loss_fn", "same"), [(divided, divided), (PADDED, padded), (padded, padded)])
def test_step_with_full_batch_loss(name: str, mode: str, inline: bool, loss_fn: Any, same: Any):
    plain, (places, balance) = model(), cut(name, "fill_drain")
    target = torch.arange(8) % 3
    expected = of_the_plain_model(plain, rows(), target, same)
    pipe = GPipe(copy.deepcopy(plain), balance, devices=places, chunks=3, checkpoint=mode)
    for source in (torch.device("cpu"), places[0]):
        x, y = rows().to(source), target.to(places[-1])
        torch.testing.assert_close(ran(partial(stepped, pipe, x, y, loss_fn=loss_fn), inline), expected)
        value = pipe.evaluate(x, y, loss_fn=loss_fn)
        torch.testing.assert_close(value.cpu(), expected[0])


@pytest.mark.parametrize("name", PLACEMENTS)
def test_full_batch_loss_has_no_race(name: str):
    plain, (places, balance) = model(), cut(name, "fill_drain")
    target = torch.arange(8) % 3
    expected = of_the_plain_model(plain, rows(), target)
    for slow in range(len(places)):
        layers = list(copy.deepcopy(plain))
        layers.insert(sum(balance[:slow]) + 1, Sleep(backward=True))
        lengths = [length + (j == slow) for j, length in enumerate(balance)]
        pipe = GPipe(nn.Sequential(*layers), lengths, devices=places, chunks=3)
        work = partial(stepped, pipe, rows(), target.to(places[-1]), loss_fn=divided)
        torch.testing.assert_close(within(60, work), expected)


@pytest.mark.parametrize("loss_fn", [counted, divided, PADDED])
def test_step_does_not_wait_for_loss_counts(loss_fn: Any):
    pipe = GPipe(model(), [2, 2, 2], devices=devices("one GPU"), chunks=3)
    x, target = rows().to(gpu()), (torch.arange(8) % 3).to(gpu())
    for _ in range(2):  # the first step learns about the layers, and may synchronize
        stepped(pipe, x, target, loss_fn=loss_fn)
    torch.cuda.synchronize()
    end = torch.cuda.Event()
    for _ in range(8):  # longer than the host needs to queue a step
        nap(gpu())
    pipe.step(x, target, loss_fn=loss_fn)
    end.record()
    assert not end.query(), "the host waited for the device"
    torch.cuda.synchronize()


@each_mode
@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("inline", [False, True])
def test_a_timeline_has_the_times_of_the_devices(name: str, mode: str, inline: bool):
    """A nap in the layer of stage 1 is time of stage 1, and waiting of the stage after it."""
    places = devices(name)
    layers = [nn.Tanh(), Sleep(), nn.Tanh()]
    pipe = GPipe(nn.Sequential(*layers), [1, 1, 1], devices=places, chunks=3, checkpoint=mode)
    work = partial(trained, pipe, rows(), places[-1])
    within(60, work)
    # Not on the idle default stream.
    with torch.cuda.stream(torch.cuda.Stream(gpu())), running(inline), gpipe.record() as timeline:
        work()
    assert all(event.seconds >= 0 and event.wait >= -1e-4 for event in timeline.events)
    if places[1].type == "cuda":
        napped = [e for e in timeline.events if e.stage == 1 and e.kind == "forward"]
        assert min(event.seconds for event in napped) > 1e-3
    if name == "two GPUs" and torch.cuda.device_count() > 1 and not inline:
        assert max(e.wait for e in timeline.events if e.stage == 2 and e.kind == "forward") > 1e-3


@each_mode
def test_gradients_may_be_zeroed_after_failed_backward(mode: str):
    """The caller's stream, even if it differs from the forward's, waits for unfinished work of the stages."""

    def fail() -> None:
        raise ZeroDivisionError

    layers = [*model(4), Call(lambda x: on_backward(x, fail)), Sleep(backward=True)]
    pipe = GPipe(nn.Sequential(*layers), [2, 2, 2], devices=devices("two GPUs"), chunks=3, checkpoint=mode)
    output = pipe(rows().to(gpu()))
    with torch.cuda.stream(torch.cuda.Stream(gpu())), pytest.raises(ZeroDivisionError):
        output.sum().backward()
    pipe.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    assert all(p.grad is None or not p.grad.any() for p in pipe.parameters())


def test_a_layer_that_replays_a_graph_is_refused():
    graphed = torch.cuda.make_graphed_callables(nn.Linear(16, 16, device=gpu()), (torch.ones(4, 16, device=gpu()),))
    for layer in (graphed, torch.compile(nn.Linear(16, 16), mode="reduce-overhead")):
        with pytest.raises(ValueError, match=r"'1' of partition 1 replays a CUDA graph"):
            GPipe(nn.Sequential(nn.Tanh(), layer), [1, 1], devices=[gpu(), gpu(1)])


def test_a_run_cannot_be_captured():
    pipe = GPipe(model(4), [2, 2], devices=[gpu(), gpu()], chunks=2)
    x = rows().to(gpu())
    pipe(x)
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        pipe(x)
    pipe(x)
