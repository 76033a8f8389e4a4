"""Layers that read or set torch's generator get at their cell's, and nothing of torch is replaced for it."""

from __future__ import annotations

import cProfile
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo  # torch's own checkpoint imports it at its first call, and it replaces torch.manual_seed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import gpipe
from gpipe import GPipe
from gpipe.checkpoint._random import RunRNG
from gpipe.checkpoint._served import in_checkpoint, is_process, lent

from .layers import Call

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]

MODES = ("never", "except_last", "always")
each_way = pytest.mark.parametrize(
    ("mode", "inline"), [(mode, inline) for mode in MODES for inline in (False, True)], ids=str
)
PLACES = (torch, torch.random, torch.utils.checkpoint, torch.nn.functional, torch.Tensor, torch.autograd.graph)


def way(inline: bool) -> Any:
    return gpipe.inline() if inline else nullcontext()


def ones() -> Tensor:
    return torch.ones(6, 8, requires_grad=True)


def pipe_of(*layers: nn.Module, mode: str) -> GPipe:
    return GPipe(nn.Sequential(*layers), [1] * len(layers), devices=["cpu"] * len(layers), chunks=3, checkpoint=mode)


class Inside(nn.Module):
    """Has a checkpoint of its own around a layer that draws."""

    def __init__(self, *, begun: bool = True, **options: Any) -> None:
        super().__init__()
        self.begun = begun
        self.options = {"use_reentrant": False, **options}

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.act, x, **self.options) if self.begun else self.act(x)

    def act(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * 1).tanh() * 1


class Fixed(nn.Module):
    """Adds the same noise in each forward, as a layer may do to be like another."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(17)
            return x * torch.rand(x.shape)


class Reversed(torch.autograd.Function):
    """Computes its forward again in the backward, as reversible layers do, with the numbers that it drew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.state = torch.get_rng_state()
        return x * torch.rand(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            return gradient * torch.rand(gradient.shape)


AROUND = (nullcontext, torch.enable_grad, torch.no_grad, torch.inference_mode, torch.autograd.graph.save_on_cpu)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inside", AROUND)
@pytest.mark.parametrize("outside", AROUND)
def test_a_checkpoint_is_seen_from_whatever_it_contains(outside: Any, inside: Any, use_reentrant: bool) -> None:
    def look(x: Tensor) -> Tensor:
        with inside():
            seen.append(in_checkpoint())
        return x * 1

    seen: list[bool] = []
    with outside():
        look(ones())
        checkpoint(look, ones(), use_reentrant=use_reentrant)
        checkpoint(look, ones(), use_reentrant=use_reentrant, preserve_rng_state=False)

    computes_again = use_reentrant or outside not in (torch.no_grad, torch.inference_mode)
    assert seen[::2] == [False, False]
    assert seen[1] or not computes_again


@contextmanager
def unchanged() -> Iterator[None]:
    """Nothing of torch is replaced inside, as another thread sees it all the time, and afterwards."""

    before = [dict(vars(place)) for place in PLACES]
    replaced: set[str] = set()
    over = threading.Event()

    def look() -> None:
        for place, names in zip(PLACES, before, strict=True):
            now = vars(place)
            replaced.update(f"{place.__name__}.{name}" for name, value in names.items() if now.get(name) is not value)

    def watch() -> None:
        while not over.wait(0.001):
            look()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    look()
    assert replaced == set()


@each_way
def test_nothing_of_torch_is_replaced(mode: str, inline: bool) -> None:
    ones()
    with unchanged(), way(inline):
        pipe = pipe_of(Inside(), Fixed(), nn.Dropout(), mode=mode)
        for _ in range(3):
            pipe(ones()).sum().backward()


def test_the_generator_is_there_for_everybody_after_a_run() -> None:
    pipe_of(Inside(), nn.Dropout(), mode="always")(ones()).sum().backward()
    generator = torch.random.default_generator
    assert torch.rand(1, generator=generator).shape == (1,)
    assert sum(len(rows) for rows in DataLoader(list(range(7)), batch_size=2, shuffle=True, generator=generator)) == 7


@each_way
def test_the_process_gives_one_number_whatever_layers_do(mode: str, inline: bool) -> None:
    """No worker puts back a state of the process's generator that another has just left."""
    pipe = pipe_of(Inside(), Fixed(), Inside(use_reentrant=True), Call(Reversed.apply), mode=mode)
    with way(inline):
        for _ in range(5):
            torch.manual_seed(4)
            torch.randint(2**32, ())
            expected = torch.get_rng_state()
            torch.manual_seed(4)
            pipe(ones()).sum().backward()
            assert torch.equal(torch.get_rng_state(), expected)
            assert torch.initial_seed() == 4


@each_way
def test_noise_with_a_seed_is_that_of_the_plain_model(mode: str, inline: bool) -> None:
    model = nn.Sequential(Fixed(), nn.Tanh(), Fixed())
    pipe = pipe_of(*model, mode=mode)
    with way(inline):
        for _ in range(3):
            x, plain = ones(), ones()
            output = pipe(x)
            expected = torch.cat([model(chunk) for chunk in plain.chunk(3)])
            output.sum().backward()
            expected.sum().backward()
            assert torch.equal(output, expected)
            torch.testing.assert_close(x.grad, plain.grad)


@each_way
def test_a_layer_that_computes_its_forward_again_in_the_backward(mode: str, inline: bool) -> None:
    pipe = pipe_of(Call(Reversed.apply), Call(Reversed.apply), mode=mode)
    with way(inline):
        for _ in range(3):
            x = ones()
            output = pipe(x)
            output.sum().backward()
            torch.testing.assert_close(x.grad, output)


def slope(output: Tensor) -> Tensor:
    """The gradient of :class:`Inside` at ones, given what it returned: 2 (1 - tanh² 2) where dropout left something."""
    return 2 * (1 - output.detach().square()) * (output.detach() != 0)


@each_way
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_begins_later_is_refused_once(mode: str, inline: bool, reentrant: bool) -> None:
    layer = Inside(begun=False, use_reentrant=reentrant)
    pipe = pipe_of(layer, mode=mode)
    with way(inline):
        for _ in range(2):
            pipe(ones()).sum().backward()
        layer.begun = True
        with pytest.raises(RuntimeError, match="run this mini-batch again"):
            pipe(ones()).sum().backward()
        for _ in range(2):
            x = ones()
            output = pipe(x)
            output.sum().backward()
            torch.testing.assert_close(x.grad, slope(output))


@each_way
def test_seeding_that_begins_later_is_refused_once(mode: str, inline: bool) -> None:
    torch.manual_seed(1)
    layer = Call(lambda x: x * torch.rand(x.shape))
    pipe = pipe_of(layer, mode=mode)
    with way(inline):
        pipe(ones()).sum().backward()
        layer.function = Fixed()
        with pytest.raises(RuntimeError, match="run this mini-batch again"):
            pipe(ones()).sum().backward()
        assert torch.equal(pipe(ones()), torch.cat([Fixed()(chunk) for chunk in ones().chunk(3)]))


@each_way
def test_a_checkpoint_that_preserves_nothing_is_left_alone(mode: str, inline: bool) -> None:
    pipe = pipe_of(Inside(preserve_rng_state=False), mode=mode)
    with way(inline):
        for _ in range(3):
            pipe(ones()).sum().backward()


def test_profile_functions_see_what_they_would_and_are_put_back() -> None:
    calls = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        calls.add(frame.f_code.co_name)

    with gpipe.inline():
        sys.setprofile(profile)
        try:
            pipe_of(Inside(), Fixed(), mode="always")(ones()).sum().backward()
            assert sys.getprofile() is profile
        finally:
            sys.setprofile(None)
    assert {"act", "fork_rng", "dropout"} <= calls


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cProfile leaves profile functions alone since Python 3.12")
def test_what_a_profiler_in_c_hides_is_refused() -> None:
    with gpipe.inline(), cProfile.Profile():
        pipe = pipe_of(nn.Dropout(), nn.Linear(8, 8), mode="always")
        for _ in range(2):
            pipe(ones()).sum().backward()
        with pytest.raises(RuntimeError, match="a profiler written in C"):
            pipe_of(Inside(), mode="always")(ones())


def test_what_a_layer_was_lent_is_nobody_else_s():
    """Else another stage would take it for a change of the process's generator."""
    torch.manual_seed(3)
    found: list[Any] = []

    def look() -> None:
        run = RunRNG()
        found.extend([is_process(torch.default_generator), run.moved(), run.seed])

    lends, ends = threading.Event(), threading.Event()

    def lend() -> None:
        with lent(torch.Generator().manual_seed(5)):
            lends.set()
            ends.wait(0.1)

    threads = [threading.Thread(target=lend), threading.Thread(target=look)]
    threads[0].start()
    assert lends.wait(20)
    threads[1].start()
    for thread in threads:
        thread.join(20)
    torch.manual_seed(3)
    assert found == [True, False, int(torch.randint(2**32, ()))]
