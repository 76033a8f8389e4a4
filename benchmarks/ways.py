"""The same training step of the same model with each tool, as a user would write it.

Each function takes a Hugging Face model and a batch, and returns a step and the trained module. All but the plain one
differ from the plain one in the lines that a user has to change; docs/benchmarks/alternatives.md shows and counts them.
The ones in `IN_TWO_PROCESSES` run in each of two processes, started by torchrun.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .workloads import llama_config

Batch = dict[str, Tensor]


@dataclass
class Training:
    """A step, and the module that it trains.

    Attributes:
        named: has the gradients, under the model's names.
        devices: for each device of this process, what its parameters are; one device with all of them by default.
    """

    step: Callable[[], object]
    named: nn.Module
    optimizer: torch.optim.Optimizer
    devices: Iterable[nn.Module] = ()

    def held(self) -> list[int]:
        """Bytes of parameters, gradients and the optimizer's state that each device of this process holds."""
        groups = [list(device.parameters()) for device in self.devices]
        return [sum(map(self._held, group)) for group in groups or [self.optimizer.param_groups[0]["params"]]]

    def _held(self, parameter: Tensor) -> int:
        state = self.optimizer.state[parameter].values()
        return sum(_bytes(each) for each in (parameter, parameter.grad, *state) if isinstance(each, Tensor))


def _bytes(tensor: Tensor) -> int:
    """Return the number of bytes that are in this process, which has only a part of a sharded tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.nbytes


def model_and_batch() -> tuple[Any, Batch]:
    """Return a Llama of four blocks, and 16 rows of 64 random words, trained to predict the next word."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(width=256, blocks=4))
    words = torch.randint(512, (16, 64))
    return model, {"input_ids": words, "labels": words}


def plain(model: Any, batch: Batch) -> Training:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return Training(step, model, optimizer)


def ddp(model: Any, batch: Batch) -> Training:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model)
    batch = {name: rows.chunk(2)[dist.get_rank()] for name, rows in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        replica(**batch).loss.backward()
        optimizer.step()

    return Training(step, model, optimizer)


def fsdp(model: Any, batch: Batch) -> Training:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    batch = {name: rows.chunk(2)[dist.get_rank()] for name, rows in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    return Training(step, model, optimizer)


class Part(nn.Module):
    """Half of the model's blocks, with the embedding before or the head after them."""

    def __init__(self, model: Any, k: int) -> None:
        super().__init__()
        self.before = model.model.embed_tokens if k == 0 else nn.Identity()
        self.positions = model.model.rotary_emb
        self.blocks = model.model.layers[2 * k : 2 * k + 2]
        self.after = nn.Sequential(model.model.norm, model.lm_head) if k == 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        positions = self.positions(x, torch.arange(x.shape[1])[None])
        for block in self.blocks:
            x = block(x, position_embeddings=positions)
        found: Tensor = self.after(x)
        return found


def pipelining(model: Any, batch: Batch) -> Training:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    k = dist.get_rank()
    part = Part(model, k)
    stage = PipelineStage(part, k, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 8, lambda logits, labels: model.loss_function(logits, labels, 512))
    inputs = (batch["input_ids"],) if k == 0 else ()
    target = {"target": batch["labels"]} if k == 1 else {}
    optimizer = torch.optim.AdamW(part.parameters())

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*inputs, **target, return_outputs=False)
        optimizer.step()

    return Training(step, model, optimizer)


def gpipe(model: Any, batch: Batch) -> Training:
    from gpipe import GPipe

    model = GPipe(model, devices=["cpu", "cpu"], chunks=8, checkpoint="never")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model.step(**batch)
        optimizer.step()

    return Training(step, model, optimizer, devices=model.partitions)


def ranks(model: Any, batch: Batch) -> Training:
    import torch.distributed as dist

    from gpipe.distributed import Rank

    dist.init_process_group("gloo")
    model = Rank(model, [2, 2], chunks=8, checkpoint="never")
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model.step(**batch)
        optimizer.step()

    return Training(step, model, optimizer)


WAYS: dict[str, Callable[[Any, Batch], Training]] = {
    "one device": plain,
    "DDP": ddp,
    "FSDP2": fsdp,
    "torch.distributed.pipelining": pipelining,
    "GPipe": gpipe,
    "Rank": ranks,
}


def lines_changed(name: str) -> int:
    """Return how many lines of code this variant has that the plain loop does not have."""
    sources = [WAYS[name], Part] if name == "torch.distributed.pipelining" else [WAYS[name]]
    return sum((Counter(line for source in sources for line in _lines(source)) - Counter(_lines(plain))).values())


def _lines(source: Any) -> list[str]:
    """Return a function's lines without its header, docstrings, blank lines and the benchmark's return statement."""
    lines = [line.strip() for line in inspect.getsource(source).splitlines()]
    lines = lines if isinstance(source, type) else lines[1:]
    return [line for line in lines if line and not line.startswith(("return Training", '"""'))]
