"""Adapters of a model in 4 bits, in a pipe, trained by TRL: fine-tuning and preferences."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from gpipe import GPipe

from .families import transformers
from .in_bits import in_4_bits, saved_llama
from .pipelined import pipelined
from .test_trl import SIZES, texts, tokenizer, trl

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed; see nox -s frameworks")
pytestmark = pytest.mark.filterwarnings("ignore")
COLUMNS = {"SFT": ("text",), "DPO": ("prompt", "chosen", "rejected")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model."""
    return saved_llama(tmp_path_factory.mktemp("model"), num_hidden_layers=3, **SIZES)


def loaded(folder: Path) -> Any:
    return peft.prepare_model_for_kbit_training(in_4_bits(folder), use_gradient_checkpointing=False)


def trainer(kind: str, where: str, folder: Path, out: Path, *, in_pipe: bool) -> Any:
    """A trainer of a model whose adapters are made before it, or by it; in a pipe or not."""
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = loaded(folder)
    if where == "in the model":
        model = peft.get_peft_model(model, lora)
    if in_pipe:
        model = GPipe(model, devices=["cpu"] * 2, chunks=3)
    arguments = getattr(trl, f"{kind}Config")(
        str(out), max_steps=3, per_device_train_batch_size=6, learning_rate=1e-2, logging_steps=1, report_to=[],
        use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, max_length=32,
    )  # fmt: skip
    torch.manual_seed(2)  # older releases draw the adapters before they set their seed
    found = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=arguments,
        train_dataset=texts(*COLUMNS[kind]),
        processing_class=tokenizer(),
        peft_config=None if where == "in the model" else lora,
    )
    for parameter in found.model.parameters():  # TRL has made them bfloat16, whose sums depend on the order
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return found


def pipe_in(model: Any) -> GPipe:
    """The pipe that a trainer's model is or has inside."""
    return next(module for module in model.modules() if isinstance(module, GPipe))


@pytest.mark.parametrize("where", ["in the model", "given to the trainer"])
@pytest.mark.parametrize("kind", COLUMNS)
def test_adapters(kind: str, where: str, folder: Path, tmp_path: Path) -> None:
    losses: dict[bool, list[float]] = {}
    for in_pipe in (False, True):
        found = trainer(kind, where, folder, tmp_path / "out", in_pipe=in_pipe)
        pipe = pipe_in(found.model) if in_pipe else None
        with nullcontext() if pipe is None else pipelined(pipe, 4 if kind == "DPO" else 2, microbatches=3):
            found.train()
        losses[in_pipe] = [entry["loss"] for entry in found.state.log_history if "loss" in entry]
    assert len(losses[True]) == 3
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)

    found.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").exists()
    assert not [*(tmp_path / "saved").rglob("model*.safetensors")]
    again = peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "saved")
    trained = peft.get_peft_model_state_dict(found.model)
    for name, value in peft.get_peft_model_state_dict(again).items():
        torch.testing.assert_close(value, trained[name])


@pytest.mark.parametrize("where", ["in the model", "given to the trainer"])
def test_the_reference_is_no_second_model(
    where: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the base with its adapters off, or with the adapters that it had at first."""
    load, folders = transformers.PreTrainedModel.from_pretrained.__func__, []

    def noted(cls: type, name: Any, *arguments: Any, **options: Any) -> Any:
        folders.append(name)
        return load(cls, name, *arguments, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(noted))
    found = trainer("DPO", where, folder, tmp_path, in_pipe=True)
    assert folders == [folder]
    assert found.ref_model is None
    found.train()
    assert folders == [folder]
    first = next(entry["loss"] for entry in found.state.log_history if "loss" in entry)
    assert first == pytest.approx(torch.tensor(2.0).log().item(), rel=1e-5)
