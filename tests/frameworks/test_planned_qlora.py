"""Plans of quantized models without weights, compared with explicit arithmetic."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gpipe
from gpipe._plan._optimizer import optimizer_bytes
from gpipe._plan._without_weights import with_packed
from profiler.memory import owned_bytes

bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from transformers.integrations import replace_with_bnb_linear  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

GIB = 2**30
RANK, WORDS = 16, 128256
LLAMAS: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
}


def qlora(size: str, layers: int | None = None, *, recomputes: bool = False) -> nn.Module:
    """A Llama on ``meta``, packed in 4 bits, with trained adapters of all linear layers but the head."""
    sizes = LLAMAS[size] | ({} if layers is None else {"num_hidden_layers": layers})
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=8, vocab_size=WORDS, use_cache=False)
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = replace_with_bnb_linear(model, ["lm_head"], bits)
        model.is_loaded_in_4bit = True
        found: nn.Module = peft.get_peft_model(
            model, peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    if recomputes:
        found.train()
        found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return found


def by_hand(size: str, layers: int) -> dict[str, int]:
    """The bytes of weights of a block, of the adapters' values in float32, and of the embedding or the head."""
    wide, inner = LLAMAS[size]["hidden_size"], LLAMAS[size]["intermediate_size"]
    few = 8 * wide // LLAMAS[size]["num_attention_heads"]  # of 8 heads of keys and values
    linear = [(wide, wide), (few, wide), (few, wide), (wide, wide), (inner, wide), (inner, wide), (wide, inner)]
    scales = sum(rows * columns // 64 + 4 * -(-rows * columns // 64 // 256) for rows, columns in linear)
    packed = sum(rows * columns // 2 for rows, columns in linear)
    adapters = 4 * sum(RANK * (rows + columns) for rows, columns in linear)
    norms = 2 * 2 * wide
    return {"blocks": layers * (packed + scales + norms), "adapters": layers * adapters, "ends": 2 * 2 * WORDS * wide}


def batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    words = torch.zeros(rows, tokens, dtype=torch.long, device="meta")
    return {"input_ids": words, "labels": words}


def checked(found: gpipe.Plan, size: str, layers: int) -> None:
    hand, bytes_of = by_hand(size, layers), found.predicted.bytes
    total = sum(hand.values())
    # Beyond that, there are the last norm and the frequencies of positions.
    assert total <= sum(need.parameters for need in bytes_of) <= total * 1.001
    assert sum(need.gradients for need in bytes_of) == hand["adapters"]
    # Two values of 8 bits each of the adapters' in 32 bits, and their scales.
    assert 0.5 * hand["adapters"] <= sum(need.optimizer for need in bytes_of) <= 0.52 * hand["adapters"]
    assert all(need.total <= size for need, size in zip(bytes_of, found.memory, strict=True))


OPTIONS: dict[str, Any] = {"reduction": "mean", "optimizer": "paged_adamw_8bit"}


def test_llama_8b_blocks_on_unequal_devices() -> None:
    model = qlora("8B", layers=2)
    names = [name for name, _ in model.named_parameters()]
    found = gpipe.plan(model, batch(4, 64), ["6GB", "3GB"], chunks=[2], **OPTIONS)
    checked(found, "8B", 2)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(parameter.is_meta for parameter in model.parameters())
    assert type(model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight) is bnb.nn.Params4bit


@pytest.mark.long
def test_llama_8b_on_24_and_12_gb() -> None:
    found = gpipe.plan(qlora("8B"), batch(16, 1024), ["24GB", "12GB"], chunks=[8], **OPTIONS)
    checked(found, "8B", 32)
    # A block has 218 million weights, of 4.127 bits each with their scales.
    assert by_hand("8B", 32)["blocks"] == pytest.approx(32 * 218.1e6 * 4.127 / 8, rel=0.002)
    assert len(found.devices) == 2


@pytest.mark.long
def test_llama_70b_on_four_times_24_gb() -> None:
    """Whose blocks recompute what they save, as is usual for QLoRA."""
    found = gpipe.plan(qlora("70B", recomputes=True), batch(16, 1024), "4x24GB", chunks=[16], **OPTIONS)
    checked(found, "70B", 80)
    assert by_hand("70B", 80)["blocks"] == pytest.approx(32.89 * GIB, rel=0.001)


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from(["fp4", "nf4"]), st.booleans(), st.booleans())
def test_replacement_has_bytes_of_packed_layer(
    rows: int, columns: int, kind: str, compressed: bool, biased: bool
) -> None:
    sizes, options = (64 * columns, 16 * rows), {"quant_type": kind, "compress_statistics": compressed}
    layer = bnb.nn.Linear4bit(*sizes, bias=biased, **options).to("cpu")
    with torch.device("meta"):
        blank = bnb.nn.Linear4bit(*sizes, bias=biased, **options)
    made = with_packed(nn.Sequential(blank))[0]
    assert type(made).__name__ == "Linear4bit"
    assert [p.numel() for p in made.parameters()] == [p.numel() for p in layer.parameters()]
    (real,), (found,) = owned_bytes([layer]), owned_bytes([made])
    # The tables of the code and the offset are as large for every layer.
    assert 0 <= sum(real.values()) - sum(found.values()) <= 2048


def test_eight_bits() -> None:
    layer = bnb.nn.Linear8bitLt(32, 16, bias=False, has_fp16_weights=False).to("cpu")
    with torch.device("meta"):
        blank = bnb.nn.Linear8bitLt(32, 16, bias=False, has_fp16_weights=False)
    (real,), (found,) = owned_bytes([layer]), owned_bytes([with_packed(nn.Sequential(blank))[0]])
    assert sum(real.values()) == sum(found.values())


def test_optimizers_of_bitsandbytes() -> None:
    layers = [nn.Linear(100, 100, bias=False), nn.Linear(5, 5, bias=False)]
    for kind in (bnb.optim.AdamW8bit, bnb.optim.AdamW, bnb.optim.Lion8bit, bnb.optim.PagedAdamW32bit):
        optimizer = kind([p for layer in layers for p in layer.parameters()], lr=1e-3)
        found = optimizer_bytes(kind, layers)
        assert found == optimizer_bytes(optimizer, layers)
        for parameter in (p for layer in layers for p in layer.parameters()):
            optimizer.init_state(optimizer.param_groups[0], parameter, 0, 0)
        tables = ("qmap1", "qmap2")
        kept = [
            sum(v.nbytes for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor) and k not in tables)
            for layer in layers
            for p in layer.parameters()
        ]
        assert found == kept


def test_infeasible_plan_names_blocks_that_could_recompute() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=4, use_cache=False
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)

    def message() -> str:
        with pytest.raises(gpipe.Infeasible) as refused:
            gpipe.plan(model, batch(8, 16), "2x100kB", chunks=[4], reduction="mean")
        return str(refused.value)

    assert "model.gradient_checkpointing_enable() may help" in message()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert "gradient_checkpointing" not in message()
