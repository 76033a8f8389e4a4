"""``transformers.Trainer(model=pipe)`` trains, evaluates, saves and resumes a pipe as it does the plain model."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe
from microbatch import map_tensors

from . import labelled
from .families import FAMILIES, transformers
from .labelled import CASES, batch_of
from .pipelined import pipelined

pytest.importorskip("accelerate", reason="Trainer needs accelerate; see nox -s frameworks")
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments, default_data_collator

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")]


def data(name: str, rows: int = 24) -> list[dict[str, Any]]:
    """Rows with a column that no model takes."""
    batch = tensors_of(single(batch_of(name, rows, "padded")))
    return [{"source": "somewhere", **{key: each[k] for key, each in batch.items()}} for k in range(rows)]


def single(batch: dict[str, Any]) -> dict[str, Any]:
    return map_tensors(lambda each: each.float() if each.is_floating_point() else each, batch)


def tensors_of(batch: dict[str, Any]) -> dict[str, Tensor]:
    return {key: each for key, each in batch.items() if isinstance(each, Tensor)}


def collator(name: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Return a collator that adds constants such as ``return_loss=True`` for CLIP."""
    batch = batch_of(name, 1, "unpadded")
    constants = {key: batch[key] for key in batch.keys() - tensors_of(batch).keys()}
    return lambda rows: {**default_data_collator(rows), **constants}


def made(name: str) -> nn.Module:
    return labelled.made(CASES[name][0])[0].float()


def pipe_of(model: nn.Module, stages: int = 2, **options: Any) -> GPipe:
    return GPipe(model, devices=["cpu"] * stages, chunks=4, **options)


def trainer(name: str, model: nn.Module, folder: Path, **options: Any) -> Trainer:
    settings = {
        "per_device_train_batch_size": 6,
        "per_device_eval_batch_size": 6,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-6,  # some gradients are zero but for rounding, which AdamW would scale up
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 3,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = TrainingArguments(output_dir=str(folder), **(settings | options))
    sets = {"train_dataset": data(name), "eval_dataset": data(name, 9)}
    return Trainer(model=model, args=arguments, data_collator=collator(name), **sets)


def logged(found: Trainer, key: str) -> list[float]:
    return [line[key] for line in found.state.log_history if key in line]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"eval_steps": 2, "max_steps": 3}) for name in CASES),
        ("BERT tokens", {"label_smoothing_factor": 0.1}),
        *((name, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1}) for name in ("Llama", "GPT-2", "BART")),
    ],
)
def test_losses_are_those_of_the_plain_model(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = made(name)
    plain = copy.deepcopy(model)
    pipe = pipe_of(model, 3, checkpoint="except_last")
    found, expected = (
        trainer(name, pipe, tmp_path / "pipe", save_strategy="no", **options),
        trainer(name, plain, tmp_path / "plain", save_strategy="no", **options),
    )
    with pipelined(pipe, 2):
        found.train()
    expected.train()
    for key in ("loss", "eval_loss", "grad_norm"):
        assert len(logged(found, key)) > 1
        assert logged(found, key) == pytest.approx(logged(expected, key), rel=1e-3), key
    assert found.model is pipe
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(pipe.state_dict()[key], value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("stages", [1, 3])
def test_it_resumes_from_a_checkpoint_with_another_balance(stages: int, tmp_path: Path) -> None:
    finished = pipe_of(made("Llama"))
    with pipelined(finished, 2):
        trainer("Llama", finished, tmp_path).train()
    fresh = pipe_of(made("Llama"), stages)
    with pipelined(fresh, 2):
        trainer("Llama", fresh, tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    torch.testing.assert_close(fresh.state_dict(), finished.state_dict(), rtol=1e-4, atol=1e-5)


def tied() -> nn.Module:
    return FAMILIES["GPT-2"].make(tie_word_embeddings=True).float()


@pytest.mark.parametrize("before", ["plain", "pipe"])
def test_tied_weights(before: str, tmp_path: Path) -> None:
    """Checkpoints of a pipe equal the plain model's, and both can resume from either."""
    model = tied()
    trainer("GPT-2", model if before == "plain" else pipe_of(model), tmp_path).train()
    resumed = tied()
    pipe = pipe_of(resumed, 3)
    again = trainer("GPT-2", pipe, tmp_path / "again", save_strategy="no")
    with pipelined(pipe, 2):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    torch.testing.assert_close(resumed.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-5)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert pipe.state_dict().keys() == model.state_dict().keys()
    rows = FAMILIES["GPT-2"].inputs(2)
    torch.testing.assert_close(loaded.eval()(**rows).logits, model.eval()(**rows).logits)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_the_best_model_is_loaded_at_the_end(name: str, tmp_path: Path) -> None:
    model = tied() if name == "GPT-2" else made(name)
    options = {"load_best_model_at_end": True, "metric_for_best_model": "age", "greater_is_better": False}
    options |= {"max_steps": 2, "eval_steps": 1, "save_steps": 1}
    pipe = pipe_of(model)
    found = trainer(name, pipe, tmp_path, **options)
    found.compute_metrics = lambda _: {"age": found.state.global_step}  # so that the best is not the last
    with pipelined(pipe, 2):
        found.train()
    losses = logged(found, "eval_loss")
    assert losses[0] != losses[1]
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    state = model.state_dict()
    assert saved.keys() <= state.keys()
    assert all(torch.equal(state[key], value) for key, value in saved.items())
    assert len({value.data_ptr() for value in state.values()}) <= len(saved)
    assert found.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-5)


def test_saved_pipe_is_saved_model(tmp_path: Path) -> None:
    """It includes the configuration, and tied weights are saved once."""
    model = tied()
    trainer("GPT-2", pipe_of(model), tmp_path / "pipe").save_model()
    trainer("GPT-2", model, tmp_path / "plain").save_model()
    names = [sorted(file.name for file in (tmp_path / name).iterdir()) for name in ("pipe", "plain")]
    assert names[0] == names[1]
    assert "config.json" in names[0]
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("pipe", "plain")]
    torch.testing.assert_close(files[0], files[1])


def test_mixed_precision(tmp_path: Path) -> None:
    model = made("Llama")
    plain = copy.deepcopy(model)
    pipe = pipe_of(model, checkpoint="always")
    found, expected = (trainer("Llama", each, tmp_path, bf16=True, save_strategy="no") for each in (pipe, plain))
    with pipelined(pipe, 2):
        found.train()
    expected.train()
    assert logged(found, "loss") == pytest.approx(logged(expected, "loss"), rel=2e-2)


def adapted(seed: int = 0) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed; see nox -s frameworks")
    model = made("Llama")
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


def adapters_around(seed: int = 0, stages: int = 2) -> Any:
    """Adapters that were put into a pipe."""
    peft = pytest.importorskip("peft", reason="peft is not installed; see nox -s frameworks")
    pipe = pipe_of(made("Llama"), stages)
    torch.manual_seed(seed)
    return peft.get_peft_model(pipe, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))


@pytest.mark.parametrize("inside", [True, False])
def test_adapters(inside: bool, tmp_path: Path) -> None:
    """A pipe of a model with adapters, and adapters of a pipe: saved alone, resumed, and the best ones loaded."""

    def piped(stages: int) -> tuple[Any, Any]:
        found = pipe_of(adapted(), stages) if inside else adapters_around(stages=stages)
        return found, found if inside else found.get_base_model()

    options = {"load_best_model_at_end": True, "metric_for_best_model": "age", "greater_is_better": False}
    found, states = [], []
    plain = adapted()
    first, pipe = piped(3)
    for model, folder in ((first, "pipe"), (plain, "plain")):
        found.append(trainer("Llama", model, tmp_path / folder, **options))
        found[-1].compute_metrics = lambda _, each=found[-1]: {"age": each.state.global_step}
    with pipelined(pipe, 2):
        found[0].train()
    found[1].train()
    assert logged(found[0], "loss") == pytest.approx(logged(found[1], "loss"), rel=1e-3)
    assert found[0].evaluate()["eval_loss"] == pytest.approx(logged(found[0], "eval_loss")[0], rel=1e-5)
    for folder in ("pipe", "plain"):
        saved = tmp_path / folder / "checkpoint-3"
        assert not (saved / "model.safetensors").exists()
        states.append(load_file(saved / "adapter_model.safetensors"))
    torch.testing.assert_close(states[0], states[1], rtol=1e-2, atol=1e-3)
    resumed, pipe = piped(1)
    again = trainer("Llama", resumed, tmp_path / "again")
    with pipelined(pipe, 2):
        again.train(resume_from_checkpoint=str(tmp_path / "pipe" / "checkpoint-3"))
    again.save_model()
    last = load_file(tmp_path / "pipe" / "checkpoint-6" / "adapter_model.safetensors")
    torch.testing.assert_close(load_file(tmp_path / "again" / "adapter_model.safetensors"), last, rtol=1e-3, atol=1e-4)
