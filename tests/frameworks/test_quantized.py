"""Adapters of a model in 4 bits, in a pipe: trained by Trainer and TRL, saved alone, resumed, loaded without a pipe."""

from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpipe import Arguments, GPipe, inline, plan
from gpipe._plan._verify import peak_bytes

from .families import transformers
from .in_bits import in_4_bits, saved_llama
from .pipelined import pipelined

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
from transformers.integrations import replace_with_bnb_linear

peft = pytest.importorskip("peft", reason="peft is not installed; see nox -s frameworks")
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.randint(2, 64, (24, 12), generator=torch.Generator().manual_seed(0))
ROWS = [{"input_ids": row, "labels": row} for row in TOKENS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model."""
    return saved_llama(tmp_path_factory.mktemp("model"), vocab_size=64, num_hidden_layers=4)


def made(kind: str, folder: Path) -> tuple[Any, nn.Module]:
    """Return a model with adapters, and a pipe, which is around the adapters or inside them."""
    torch.manual_seed(1)
    base = peft.prepare_model_for_kbit_training(in_4_bits(folder), use_gradient_checkpointing=False)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if kind == "inside":
        pipe = GPipe(base, devices=["cpu"] * 2, chunks=3)
        return peft.get_peft_model(pipe, lora), pipe
    tuned = peft.get_peft_model(base, lora)
    found = tuned if kind == "plain" else GPipe(tuned, devices=["cpu"] * 2, chunks=3)
    return found, found


def trainer(model: nn.Module, out: Path, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        str(out), max_steps=4, per_device_train_batch_size=6, learning_rate=1e-2, logging_steps=1, save_steps=2,
        eval_strategy="steps", eval_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip
    return transformers.Trainer(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:6])


def losses(found: Any) -> list[float]:
    return [entry["loss"] for entry in found.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", ["around", "inside"])
def test_trainer(kind: str, folder: Path, tmp_path: Path) -> None:
    found = {}
    for each in ("plain", kind):
        model, pipe = made(each, folder)
        found[each] = trainer(model, tmp_path / each, load_best_model_at_end=True)
        with nullcontext() if each == "plain" else pipelined(pipe, 2):
            found[each].train()
    assert losses(found[kind]) == pytest.approx(losses(found["plain"]), rel=1e-4)
    checkpoint = tmp_path / kind / "checkpoint-2"
    assert not (checkpoint / "model.safetensors").exists()
    model, pipe = made(kind, folder)
    resumed = trainer(model, tmp_path / "again")
    with pipelined(pipe, 2):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed) == pytest.approx(losses(found[kind]), rel=1e-4)
    resumed.save_model(str(tmp_path / "adapters"))
    again = peft.PeftModel.from_pretrained(in_4_bits(folder), tmp_path / "adapters").eval()
    with torch.no_grad():
        loss = float(again(input_ids=TOKENS[:6], labels=TOKENS[:6]).loss)
    assert resumed.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-4)
    merged = again.merge_and_unload()
    assert not any("lora" in name for name, _ in merged.named_parameters())


def in_8_bits(folder: Path) -> Any:
    bits = transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits, dtype="float32")


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("load", [in_4_bits, in_8_bits])
def test_plan_without_devices(load: Callable[[Path], Any], checkpoint: str, folder: Path) -> None:
    """Packed bytes are counted exactly. Bytes of a step are within a fifth of the CPU's."""
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model, batch = peft.get_peft_model(load(folder), lora), {"input_ids": TOKENS[:6], "labels": TOKENS[:6]}
    found = plan(model, batch, "2x24GB", chunks=2, checkpoint=checkpoint, schedule="fill_drain")
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert sum(need.gradients for need in found.predicted.bytes) == trained
    with closing(GPipe(model, found.balance, devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)) as pipe, inline():
        pipe.step(**batch)
        real = peak_bytes(pipe, Arguments((), batch), None, {}, "fill_drain", (0, 1))
    assert [need.total - need.optimizer for need in found.predicted.bytes] == pytest.approx(real, rel=0.2)


@pytest.mark.parametrize("saved", ["plain", "packed"])
@pytest.mark.parametrize("bits", [4, 8])
def test_stages_read_quantized_weights(bits: int, saved: str, folder: Path, tmp_path: Path) -> None:
    """Layer by layer: packed ones, or such as are quantized when they arrive."""
    expected = (in_4_bits if bits == 4 else in_8_bits)(folder)
    source = folder if saved == "plain" else tmp_path
    expected.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    model = replace_with_bnb_linear(model, ["lm_head"], expected.config.quantization_config)
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=3, init=source)
    assert pipe.state_dict().keys() == expected.state_dict().keys()
    batch = {"input_ids": TOKENS[:6], "labels": TOKENS[:6]}
    with torch.no_grad(), pipelined(pipe, 2):
        found = pipe.evaluate(**batch)
    torch.testing.assert_close(found, expected(**batch).loss.detach())
