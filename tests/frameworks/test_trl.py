"""TRL's trainers train a pipe as they do the plain model: fine-tuning, padded and packed, and preferences."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from .families import transformers
from .pipelined import pipelined

trl = pytest.importorskip("trl", reason="TRL is not installed; see nox -s frameworks")
datasets, tokenizers = pytest.importorskip("datasets"), pytest.importorskip("tokenizers")

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::RuntimeWarning"
)
WORDS = ["<pad>", "<eos>", *(f"w{k}" for k in range(62))]
SIZES = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, **dropout, **SIZES))


def tokenizer() -> Any:
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<pad>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def texts(*columns: str) -> Any:
    chosen = random.Random(0)
    rows = [
        {name: " ".join(chosen.choices(WORDS[2:], k=chosen.randrange(3, 12))) for name in columns} for _ in range(24)
    ]
    return datasets.Dataset.from_list(rows)


def sample(*names: str, rows: int = 2) -> dict[str, Tensor]:
    return {name: torch.ones(rows, 8, dtype=torch.int64) for name in names}


def trained(
    kind: str, model: nn.Module, folder: Path, data: Any, settings: dict[str, Any], **options: Any
) -> list[float]:
    """The losses of three steps."""
    arguments = getattr(trl, f"{kind}Config")(
        str(folder), max_steps=3, per_device_train_batch_size=6, learning_rate=1e-2, logging_steps=1, report_to=[],
        use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, seed=0, **settings,
    )  # fmt: skip
    found = getattr(trl, f"{kind}Trainer")(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer(), **options
    )
    found.train()
    return [entry["loss"] for entry in found.state.log_history if "loss" in entry]


def expect_the_same(kind: str, make: Any, inputs: dict[str, Tensor], *arguments: Any, **options: Any) -> None:
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    pipe = GPipe(model.train(), devices=["cpu", "cpu"], chunks=3)
    expected = trained(kind, plain, *arguments, **copy.deepcopy(options))
    with pipelined(pipe, 2):
        losses = trained(kind, pipe, *arguments, **copy.deepcopy(options))
    assert losses == pytest.approx(expected, rel=1e-5)
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("packed", [False, True])
def test_fine_tuning(make: Any, packed: bool, tmp_path: Path) -> None:
    options = {"max_length": 8, "packing": packed, "packing_strategy": "wrapped"}
    inputs = sample("input_ids", "labels", "attention_mask")
    expect_the_same("SFT", make, inputs, tmp_path, texts("text"), options)


def test_documents_packed_in_one_row(tmp_path: Path) -> None:
    """A row cannot be cut, so that there is one micro-batch; without a cache, as the error says, it is right."""

    def make() -> nn.Module:
        model = llama()
        model.config.use_cache = False
        return model

    inputs = sample("input_ids", "labels", "position_ids", "seq_idx", rows=1)
    inputs |= {"cu_seq_lens_q": torch.tensor([0, 8]), "cu_seq_lens_k": torch.tensor([0, 8])}
    inputs |= {"max_length_q": 8, "max_length_k": 8}
    options = {"max_length": 16, "packing": True}
    expect_the_same("SFT", make, inputs, tmp_path, texts("text"), options)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("ahead", [False, True])
def test_preferences(make: Any, ahead: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    inputs = sample("input_ids", "attention_mask")
    options = {"precompute_ref_log_probs": ahead, "max_length": 32}
    data = texts("prompt", "chosen", "rejected")
    expect_the_same("DPO", make, inputs, tmp_path, data, options, ref_model=make())


@pytest.mark.parametrize("make", [llama, gpt2])
def test_rewards_of_generated_texts(make: Any, tmp_path: Path) -> None:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    options = {"num_generations": 3, "max_completion_length": 8}
    inputs = sample("input_ids", "attention_mask")
    expect_the_same("GRPO", make, inputs, tmp_path, texts("prompt"), options, reward_funcs=reward)
