"""A Rank in Hugging Face's Trainer has the losses and weights of the plain model, whatever is accumulated or padded."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packages.gpipe.tests.worlds import World
from torch import nn

from gpipe.distributed import Rank

from .labelled import CASES, batch_of, made

transformers = pytest.importorskip("transformers", reason="transformers is not installed; see nox -s frameworks")


class RankTrainer(transformers.Trainer):
    """The trainer of docs/howto/processes-frameworks.md."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        with self.accelerator.autocast():
            loss = model.train().step(**inputs, num_items_in_batch=num_items_in_batch)
        if self.accelerator.sync_gradients:
            model.clip_grad_norm_(0.1)
        return loss

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with self.accelerator.autocast():
            return model.eval().evaluate(**inputs), None, None


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Mixtral"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_losses_and_weights_match_the_plain_trainer(world: World, name: str, accumulation: int, tmp_path: Any) -> None:
    world.run(_expect_plain, name, accumulation, False, str(tmp_path))


def test_bfloat16_matches_the_plain_trainer(world: World, tmp_path: Any) -> None:
    world.run(_expect_plain, "Llama", 3, True, str(tmp_path))


def _expect_plain(name: str, accumulation: int, bf16: bool, folder: str) -> None:
    """Rows have labels of varying number. The data set has a column that the model does not take."""
    model = made(CASES[name][0])[0]
    batch = batch_of(name, 16, "padded")
    rows = [{"other": k, **{key: value[k] for key, value in batch.items()}} for k in range(16)]
    options = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "optim": "adamw_torch",
        "eval_strategy": "epoch",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": bf16,
        "disable_tqdm": True,
    }
    plain = copy.deepcopy(model)
    logs, trained = [], list[nn.Module]()
    for kind, module, norm in ((transformers.Trainer, plain, 0.1), (RankTrainer, Rank(model, chunks=2), 0.0)):
        arguments = transformers.TrainingArguments(folder, max_grad_norm=norm, **options)
        trainer = kind(module, arguments, train_dataset=rows, eval_dataset=rows[:6])
        trainer.train()
        logs.append([each.get("loss", each.get("eval_loss")) for each in trainer.state.log_history[:-1]])
        trained.append(module)
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)
    assert len(logs[0]) == 2 * (1 + (4 + accumulation - 1) // accumulation)
    rank = trained[1]
    for key, parameter in rank.named_parameters():
        torch.testing.assert_close(parameter, plain.get_parameter(key), rtol=1e-3, atol=1e-4)
    assert 0 < len([*rank.parameters()]) < len([*plain.parameters()])
    assert dist.get_world_size() == 2
