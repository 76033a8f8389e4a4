"""A real transformer, flattened: the embedding, the blocks, the last norm, the head."""

import pytest
import torch
from torch import nn

from profiler import profile, profile_sizes

transformers = pytest.importorskip("transformers")


class Embed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.tokens, self.positions, self.drop = model.wte, model.wpe, model.drop

    def forward(self, ids):
        return self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))


class Block(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden):
        output = self.block(hidden)
        return output[0] if isinstance(output, tuple) else output


def gpt2(attention):
    config = transformers.GPT2Config(
        n_layer=3, n_embd=48, n_head=4, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0, attn_pdrop=0
    )
    config._attn_implementation = attention
    model = transformers.GPT2Model(config)
    return nn.Sequential(Embed(model), *map(Block, model.h), model.ln_f, nn.Linear(48, 100, bias=False))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_fake_sizes_are_the_real_ones(attention):
    model, ids = gpt2(attention), torch.randint(0, 100, (4, 16))
    real = profile_sizes(model, ids, 2, 4.0, "cpu")
    assert min(real) > 0
    assert profile_sizes(model, ids, 2, 4.0, "meta") == real
    with torch.device("meta"):
        ghost = gpt2(attention)
    assert profile_sizes(ghost, ids, 2, 4.0, None) == real


def test_fake_figures_are_the_real_ones():
    model, ids = gpt2("sdpa"), torch.randint(0, 100, (4, 16))
    real, fake = profile(model, ids, device="cpu", timeout=1e-6), profile(model, ids, device="meta")
    for by in ("saved_bytes", "output_bytes", "peak_bytes", "parameter_bytes", "flops"):
        assert fake.costs(by) == real.costs(by), by
