"""``pipe.generate`` is the model's own, with its modules on several devices."""

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from .accelerator import device, library


class Kept:
    """State that layers keep from token to token, like a key-value cache."""

    def __init__(self) -> None:
        self.sums: dict[nn.Module, Tensor] = {}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: Tensor, other: Tensor, kept: Kept | None = None) -> Tensor:
        hidden = hidden + self.inner(other)
        if kept is not None:
            hidden = kept.sums[self] = kept.sums.get(self, 0) + hidden
        return hidden + self.outer(hidden).tanh()


class Translator(nn.Module):
    """The embeddings of both halves are one, and on the first device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(9, 4), nn.Embedding(12, 4)
        self.encoder = nn.ModuleList(Layer() for _ in range(3))
        self.again, self.more_places = nn.Embedding(9, 4), nn.Embedding(12, 4)
        self.again.weight = self.embed.weight
        self.decoder = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(4, 9)

    def forward(self, tokens: Tensor, words: Tensor, kept: Kept | None = None) -> Tensor:
        source = self.embed(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.encoder:
            source = layer(source, source)
        hidden = self.again(words) + self.more_places(torch.arange(words.shape[1], device=words.device))
        for layer in self.decoder:
            hidden = layer(hidden, source.mean(1, keepdim=True), kept)
        return self.head(hidden.tanh())

    @torch.no_grad()
    def generate(self, tokens: Tensor, *, steps: int) -> Tensor:
        kept, words = Kept(), tokens[:, :1]
        for _ in range(steps):
            words = torch.cat([words, self(tokens, words[:, -1:], kept)[:, -1:].argmax(-1).to(words.device)], 1)
        return words


@pytest.mark.parametrize("places", [(0, 1), (0, 1, 2), (0, 0)])
@pytest.mark.parametrize("first", [1, 3, 4])
def test_generate_matches_plain_model_and_frees_cache(places: tuple[int, ...], first: int) -> None:
    torch.manual_seed(0)
    plain = Translator()
    tokens = torch.randint(9, (3, 5))
    model = copy.deepcopy(plain).to(device(places[0]))
    model.again.weight = model.embed.weight  # which were made two by the move to a device that torch does not know
    rest = [6 - first] if len(places) == 2 else [1, 5 - first]
    pipe = GPipe(model, [first, *rest], devices=[device(k) for k in places], chunks=2)
    gc.collect()
    used = [library().used(k) for k in range(3)]
    for _ in range(2):
        assert torch.equal(pipe.generate(tokens, steps=6).cpu(), plain.generate(tokens, steps=6))
    assert [library().used(k) for k in range(3)] == used
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    torch.testing.assert_close(pipe(tokens=tokens, words=tokens).cpu(), plain(tokens, tokens))


@pytest.mark.parametrize("places", [(0, 1), (0, 1, 2), (0, 0), (None, 0, 1), (1, 2)])
def test_so_does_a_pipe_of_the_model_itself(places: tuple[int | None, ...]) -> None:
    torch.manual_seed(0)
    plain = Translator()
    tokens = torch.randint(9, (3, 5))
    pipe = GPipe(copy.deepcopy(plain), devices=[device(k) for k in places], chunks=2)

    def used() -> list[int]:
        """Bytes in use while nothing computes, with no help of the garbage collector."""
        torch.testing.assert_close(pipe(tokens=tokens, words=tokens).cpu(), plain(tokens, tokens))
        pipe(tokens=tokens, words=tokens).sum().backward()
        pipe.zero_grad()
        assert torch.equal(pipe.generate(tokens, steps=6).cpu(), plain.generate(tokens, steps=6))
        return [library().used(k) for k in range(3)]

    gc.collect()
    gc.disable()
    try:
        before = used()
        assert [used() for _ in range(2)] == [before] * 2
    finally:
        gc.enable()
