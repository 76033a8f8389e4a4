"""The same training step in each library, as a callable. Runs in the contender's own process.

python -m benchmarks.programs gpipe always        # milliseconds of the first two steps in this interpreter
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .contenders import IN_TWO_PROCESSES, STAGES, Contender, Task
from .measure import bind_to_share, timed
from .ways import WAYS, model_and_batch
from .workloads import Workload, by_name

# An optimizer's step costs the same whatever its rate; with this one, thousands of steps leave the results comparable.
LEARNING_RATE = 1e-9
Costs = tuple[dict[tuple[int, str], float], float]  # median seconds by stage and kind of action; of an optimizer's step


@dataclass
class Program:
    """A library's step on a task.

    Attributes:
        run: does one step, and returns the output if it trains nothing.
        module: has the gradients, under the names of the workload's model.
        prepare: to be called before each step, untimed.
        costs: returns the costs of an inline program's actions and optimizer.
        held: returns the bytes of each device of this process, for the alternatives.
    """

    run: Callable[[], Tensor | None]
    module: nn.Module
    prepare: Callable[[], object] = lambda: None
    costs: Callable[[], Costs | None] = lambda: None
    held: Callable[[], list[int]] = list


def build(contender: Contender, task: Task) -> Program:
    """Set the process's number of threads and make the contender's program for `task`."""
    if contender.threads is not None:
        torch.set_num_threads(contender.threads)
    if contender.library in WAYS:
        return _way(contender)
    workload = by_name(task.workload)
    program = LIBRARIES[contender.library](workload, contender, task)
    return program if task.training else _without_gradients(program)


def _way(contender: Contender) -> Program:
    """Build the program of an alternative, as a user would write it, on the model and batch shared by all."""
    import torch.distributed as dist

    several = contender.library in IN_TWO_PROCESSES
    if several:
        bind_to_share(int(os.environ["RANK"]), 2)  # before gloo starts its threads
    training = WAYS[contender.library](*model_and_batch())
    return Program(training.step, training.named, dist.barrier if several else list, held=training.held)


def _without_gradients(program: Program) -> Program:
    program.module.eval()
    run = program.run

    def forward() -> Tensor | None:
        with torch.no_grad():
            return run()

    return Program(forward, program.module, program.prepare)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer used by every training step."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def _model(workload: Workload, skips: str) -> nn.Sequential:
    """Build the workload's model, with the same parameters for every library."""
    torch.manual_seed(0)
    return workload.model(importlib.import_module(skips))


def _batch(workload: Workload) -> Tensor:
    torch.manual_seed(1)
    return workload.batch()


def _loop(workload: Workload, contender: Contender, task: Task) -> Program:
    """The plain model on one micro-batch after the other."""
    model, batch = _model(workload, "gpipe.skip"), _batch(workload)
    optimizer = optimizer_of(model)

    def train() -> None:
        optimizer.zero_grad()
        # Separate leaves, because a backward through chunk() would allocate a gradient of the full batch per chunk.
        chunks = [chunk.requires_grad_() for chunk in batch.detach().chunk(task.chunks)]
        for chunk in chunks:
            workload.loss(model(chunk)).backward()
        torch.cat([_gradient(chunk) for chunk in chunks])
        optimizer.step()

    def forward() -> Tensor:
        return torch.cat([model(chunk) for chunk in batch.chunk(task.chunks)])

    return Program(train if task.training else forward, model)


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _two_loops(workload: Workload, contender: Contender, task: Task) -> Program:
    """Two loops that share nothing, each on a thread that is kept: how much more the machine does on two threads."""
    from streams import limit_threads

    loops = [_loop(workload, contender, task) for _ in range(2)]
    shares = iter(range(2))

    def settle() -> None:
        limit_threads(1)
        torch.set_grad_enabled(task.training)
        bind_to_share(next(shares), 2)

    threads = ThreadPoolExecutor(2, initializer=settle)

    def run() -> Tensor | None:
        first, _ = [future.result() for future in [threads.submit(loop.run) for loop in loops]]
        return first

    return Program(run, loops[0].module)


def _plain(workload: Workload, contender: Contender, task: Task) -> Program:
    """Run the unmodified model on the full mini-batch."""
    model, batch = _model(workload, "gpipe.skip"), _batch(workload)
    return _by_module(model, model, batch, workload, task)


def _by_module(call: nn.Module, names: nn.Module, batch: Tensor, workload: Workload, task: Task) -> Program:
    """Train anything callable like a module: forward, loss, backward, optimizer."""
    optimizer = optimizer_of(names)

    def train() -> None:
        optimizer.zero_grad()
        workload.loss(call(batch.detach().requires_grad_())).backward()
        optimizer.step()

    return Program(train if task.training else lambda: call(batch), names)


def _gpipe(workload: Workload, contender: Contender, task: Task) -> Program:
    from gpipe import GPipe

    model, batch = _model(workload, "gpipe.skip"), _batch(workload)
    balance: tuple[int, ...] = workload.balance
    devices = ["cpu"] * STAGES
    if contender.schedule == "interleaved":
        assert workload.quarters is not None
        balance, devices = workload.quarters, ["cpu:0", "cpu:1", "cpu:0", "cpu:1"]
    pipe = GPipe(model, balance, devices=devices, chunks=task.chunks, checkpoint=contender.checkpoint)
    if not contender.schedule:
        return _by_module(pipe, pipe, batch, workload, task)
    return Program(_stepping(pipe, batch, workload, contender), pipe)


def _stepping(pipe: Any, batch: Tensor, workload: Workload, contender: Contender) -> Callable[[], None]:
    """A training step of a pipe or a rank by a schedule, with the optimizer's."""
    optimizer = optimizer_of(pipe)

    def step() -> None:
        optimizer.zero_grad()
        pipe.step(
            batch.detach().requires_grad_(),
            loss_fn=lambda output, _: workload.loss(output),
            schedule=contender.schedule,
            reduction="sum",
        )
        optimizer.step()

    return step


def _inline(workload: Workload, contender: Contender, task: Task) -> Program:
    """gpipe's step on the caller's thread, one action after the other; notes the seconds of each."""
    import gpipe
    from gpipe.balance._balance import intra_op_threads

    program = _gpipe(workload, contender, task)
    seen: dict[tuple[int, str], list[float]] = defaultdict(list)
    share = max(1, torch.get_num_threads() // STAGES)  # what a worker has

    def step() -> None:
        with intra_op_threads(share), gpipe.inline(), gpipe.record() as timeline:
            program.run()
        for event in timeline.events:
            seen[event.stage, event.kind].append(event.seconds)

    def costs() -> Costs:
        actions = {action: median(seconds) for action, seconds in seen.items()}
        return actions, median(timed(optimizer_of(program.module).step) for _ in range(10))

    return Program(step, program.module, costs=costs)


def _torchgpipe(workload: Workload, contender: Contender, task: Task) -> Program:
    from torchgpipe import GPipe

    return _ancestor(GPipe, "torchgpipe.skip", workload, contender, task)


def _fairscale(workload: Workload, contender: Contender, task: Task) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says of itself that it is deprecated
        from fairscale.nn import Pipe

        return _ancestor(Pipe, "fairscale.nn.pipe.skip", workload, contender, task)


def _ancestor(pipe: Any, skips: str, workload: Workload, contender: Contender, task: Task) -> Program:
    """torchgpipe, and fairscale's Pipe, which is a fork of it."""
    model, batch = _model(workload, skips), _batch(workload)
    call = pipe(model, workload.balance, devices=["cpu"] * STAGES, chunks=task.chunks, checkpoint=contender.checkpoint)
    if not task.training:
        call.eval()
    # It holds the same layers, but calls them by the numbers of their partitions.
    return _by_module(call, model, batch, workload, task)


def _distributed(workload: Workload, contender: Contender, task: Task) -> Program:
    from . import distributed

    model, batch = _model(workload, "benchmarks.distributed"), _batch(workload)
    return Program(*distributed.build(model, batch, workload, contender, task))


def _ranks(workload: Workload, contender: Contender, task: Task) -> Program:
    """Run gpipe.distributed.Rank, in processes set up as for torch.distributed.pipelining."""
    import torch.distributed as dist

    from gpipe.distributed import Rank

    from . import distributed

    distributed.place()
    model, batch = _model(workload, "gpipe.skip"), _batch(workload)
    balance = distributed.cuts(workload, contender)
    rank = Rank(model, balance, chunks=task.chunks, checkpoint=contender.checkpoint)
    return Program(_stepping(rank, batch, workload, contender), rank, dist.barrier)


def named_results(program: Program, output: Tensor | None) -> dict[str, Tensor]:
    """Return the results compared between libraries: gradients of parameters after training, otherwise the output."""
    if output is not None:
        return {"output": output.detach()}
    # torchgpipe and fairscale wrap each layer that skips in a module.
    found = program.module.named_parameters()
    return {name.replace(".module.", "."): _whole(p.grad) for name, p in found if p.grad is not None}


def _whole(gradient: Any) -> Tensor:
    """A sharded gradient, from all processes."""
    found: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return found


def slices(model: nn.Sequential, balance: tuple[int, ...]) -> Iterator[OrderedDict[str, nn.Module]]:
    """The layers of each stage, under their own names."""
    layers = iter(model.named_children())
    for count in balance:
        yield OrderedDict(next(layers) for _ in range(count))


LIBRARIES: dict[str, Callable[[Workload, Contender, Task], Program]] = {
    "loop": _loop,
    "two loops": _two_loops,
    "plain": _plain,
    "gpipe": _gpipe,
    "inline": _inline,
    "torchgpipe": _torchgpipe,
    "fairscale": _fairscale,
    "distributed": _distributed,
    "distributed, even cuts": _distributed,
    "ranks": _ranks,
    "ranks, even cuts": _ranks,
}


if __name__ == "__main__":
    program = build(Contender(*sys.argv[1:]), Task("W 64", 8))
    print(*(timed(program.run) * 1e3 for _ in range(2)), flush=True)
    os._exit(0)  # fairscale's workers would keep the interpreter from ending
