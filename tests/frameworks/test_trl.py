"""TRL's trainers train a pipe as they do the plain model: fine-tuning, padded and packed, and preferences."""

import copy
import importlib
import inspect
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe import GPipe, Packed
from microbatch import Replicate

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
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    found.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} <eos> {% endgeneration %}"
        "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    return found


def texts(*columns: str) -> Any:
    chosen = random.Random(0)
    rows = [
        {name: " ".join(chosen.choices(WORDS[2:], k=chosen.randrange(3, 12))) for name in columns} for _ in range(24)
    ]
    return datasets.Dataset.from_list(rows)


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


def expect_the_same(
    kind: str,
    make: Any,
    folder: Path,
    data: Any,
    settings: dict[str, Any],
    *,
    rows: int = 2,
    microbatches: int = 3,
    in_spec: Any = None,
    **options: Any,
) -> None:
    """Train a model and a pipe of its copy, in micro-batches of ``rows``."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    pipe = GPipe(model.train(), devices=["cpu", "cpu"], chunks=3, in_spec=in_spec)
    torch.manual_seed(0)  # releases such as TRL 1.4 draw the adapters before they set their seed
    expected = trained(kind, plain, folder, data, settings, **copy.deepcopy(options))
    torch.manual_seed(0)
    with pipelined(pipe, rows, microbatches=microbatches):
        losses = trained(kind, pipe, folder, data, settings, **copy.deepcopy(options))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(losses) == 3
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def lora() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed; see nox -s frameworks")
    return peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("packed", [False, True])
def test_fine_tuning(make: Any, packed: bool, tmp_path: Path) -> None:
    options = {"max_length": 8, "packing": packed, "packing_strategy": "wrapped"}
    expect_the_same("SFT", make, tmp_path, texts("text"), options)


@pytest.mark.parametrize(
    "options", [{"packing": True, "max_length": 16}, {"padding_free": True, "max_length": None}], ids=str
)
def test_documents_packed_in_one_row(options: dict[str, Any], tmp_path: Path) -> None:
    """The row is split between documents, with cumulative lengths recomputed per micro-batch."""
    expect_the_same("SFT", llama, tmp_path, texts("text"), options, rows=1, in_spec=Packed())


def test_packed_row_is_not_split_with_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The pipe is configured for documents without rows of their own, and warns that there is one micro-batch."""
    options = {"max_length": 16, "packing": True}
    collator = importlib.import_module("trl.trainer.sft_trainer")
    if "cu_seq_lens_q" not in inspect.getsource(collator.DataCollatorForLanguageModeling):  # in releases such as 1.4
        expect_the_same("SFT", llama, tmp_path, texts("text"), options, rows=1, microbatches=1)
        return
    with pytest.raises(ValueError, match="all tensors of a mini-batch must give the same number") as raised:
        expect_the_same("SFT", llama, tmp_path, texts("text"), options)
    assert any("in_spec=gpipe.Packed()" in note for note in raised.value.__notes__)
    whole = {"cu_seq_lens_q": Replicate(), "cu_seq_lens_k": Replicate()}
    with caplog.at_level(logging.WARNING, "gpipe"):
        expect_the_same("SFT", llama, tmp_path, texts("text"), options, rows=1, microbatches=1, in_spec=whole)
    assert sum("in_spec=gpipe.Packed()" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_checkpointing": False},
        {"label_smoothing_factor": 0.1},
        {"loss_type": "dft"},
        {"gradient_accumulation_steps": 2},
        {"completion_only_loss": False},
    ],
    ids=str,
)
def test_fine_tuning_on_completions(options: dict[str, Any], tmp_path: Path) -> None:
    expect_the_same("SFT", llama, tmp_path, texts("prompt", "completion"), options)


def test_fine_tuning_on_answers_of_an_assistant(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": each["q"]}, {"role": "assistant", "content": each["a"]}]}
        for each in texts("q", "a")
    ]
    expect_the_same("SFT", llama, tmp_path, datasets.Dataset.from_list(rows), {"assistant_only_loss": True})


def test_fine_tuning_with_adapters(tmp_path: Path) -> None:
    expect_the_same("SFT", llama, tmp_path, texts("text"), {"max_length": 8}, peft_config=lora())


def test_evaluation(tmp_path: Path) -> None:
    options = {"max_length": 8, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6}
    expect_the_same("SFT", llama, tmp_path, texts("text"), options, eval_dataset=texts("text"))


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("ahead", [False, True])
def test_preferences(make: Any, ahead: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"precompute_ref_log_probs": ahead, "max_length": 32}
    data = texts("prompt", "chosen", "rejected")
    expect_the_same("DPO", make, tmp_path, data, options, rows=4, ref_model=make())


@pytest.mark.parametrize("ahead", [False, True])
def test_preferences_with_adapters(ahead: bool, tmp_path: Path) -> None:
    """The reference is the model without its adapters."""
    options = {"precompute_ref_log_probs": ahead, "max_length": 32}
    data = texts("prompt", "chosen", "rejected")
    expect_the_same("DPO", llama, tmp_path, data, options, rows=4, peft_config=lora())


@pytest.mark.parametrize("adapted", [False, True])
def test_desirable_and_undesirable_answers(adapted: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows = [{**row, "label": bool(k % 2)} for k, row in enumerate(texts("prompt", "completion"))]
    options = {"peft_config": lora()} if adapted else {"ref_model": llama()}
    expect_the_same("KTO", llama, tmp_path, datasets.Dataset.from_list(rows), {"max_length": 32}, **options)


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed; see nox -s frameworks")
    return peft.get_peft_model(llama(), lora())  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO"])
def test_pipe_of_model_with_adapters(kind: str, tmp_path: Path) -> None:
    """The reference is a copy of its adapters, which the trainer adds to the model."""
    data = texts("prompt", "chosen", "rejected") if kind == "DPO" else texts("prompt", "completion")
    options: dict[str, Any] = {"max_length": 32}
    others: dict[str, Any] = {}
    if kind == "KTO":
        data = datasets.Dataset.from_list([{**row, "label": bool(k % 2)} for k, row in enumerate(data)])
    if kind == "GRPO":
        data, options = texts("prompt"), {"num_generations": 3, "max_completion_length": 8, "beta": 0.1}
        others = {"reward_funcs": distinct_words}
    expect_the_same(kind, adapted, tmp_path, data, options, rows=4 if kind == "DPO" else 2, **others)


def classifier() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_labels=1, **SIZES
    )
    return transformers.LlamaForSequenceClassification(config)


def test_rewards(tmp_path: Path) -> None:
    expect_the_same("Reward", classifier, tmp_path, texts("chosen", "rejected"), {"max_length": 32}, rows=4)


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_rewards_of_generated_texts(make: Any, beta: float, tmp_path: Path) -> None:
    options = {"num_generations": 3, "max_completion_length": 8, "beta": beta}
    adapters = {"peft_config": lora()} if beta else {}
    expect_the_same("GRPO", make, tmp_path, texts("prompt"), options, reward_funcs=distinct_words, **adapters)
