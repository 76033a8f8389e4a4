"""A plugin of pytest: the suites of transformers' trainer and of PEFT, with their models in pipes.

Run it in a checkout of transformers, once plain and once with pipes, with this folder on PYTHONPATH, and compare:

    PIPES=none PIPES_OUT=plain.jsonl python -m pytest -p piped tests/trainer
    PIPES=trainer PIPES_OUT=piped.jsonl python -m pytest -p piped tests/trainer
    python piped.py plain.jsonl piped.jsonl

In a checkout of PEFT, it is ``PIPES=peft``, and each model with adapters is in a pipe, which ignores ``to("cpu")``.

A model without a list of blocks, or one that a pipe rejects, is left unchanged, which the output files report.
"""

import functools
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn, ones

from gpipe import GPipe, record

PIPES, OUT = os.environ.get("PIPES", "none"), Path(os.environ.get("PIPES_OUT", "outcomes.jsonl"))
WITHOUT_BLOCKS = (
    "RegressionModel",
    "RegressionDictModel",
    "RegressionPreTrainedModel",
    "RegressionRandomPreTrainedModel",
)
"""Models of transformers' tests that are one multiplication; they get blocks that compute nothing."""
seen: dict[str, Any] = {}


def pytest_configure() -> None:
    if PIPES == "trainer":
        _wrap_trainers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if PIPES == "peft":
        _wrap_adapters({item.module for item in items if isinstance(item, pytest.Function)})
    module = sys.modules.get("tests.trainer.trainer_test_utils")
    for name in WITHOUT_BLOCKS:
        if hasattr(module, name):
            _give_blocks(getattr(module, name))


def pytest_runtest_logstart() -> None:
    seen.clear()
    seen.update(pipes=0, refused=[], without_blocks=0, forwards=0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    with record() as timeline:
        try:
            yield
        finally:
            seen["forwards"] = sum(event.kind == "forward" for event in timeline.events)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report: Any = yield
    if call.when == "call" or report.outcome != "passed":
        error = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"[:600]
        with OUT.open("a") as lines:
            lines.write(json.dumps({"test": item.nodeid, "outcome": report.outcome, "error": error, **seen}) + "\n")
    return report


def piped(model: Any) -> Any:
    """A pipe of the model, if it has a list of blocks."""
    if not isinstance(model, nn.Module) or isinstance(model, GPipe):
        return model
    if PIPES == "trainer" and not any(isinstance(each, nn.ModuleList) and len(each) > 1 for each in model.modules()):
        seen["without_blocks"] += 1
        return model
    try:
        pipe = GPipe(model, devices=["cpu"] * 2, chunks=2)
    except Exception as error:
        seen["refused"].append(f"{type(error).__name__}: {error}"[:300])
        return model
    seen["pipes"] += 1
    return pipe


class Same(nn.Module):
    """A block with a parameter that is not trained, which returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one


def _give_blocks(kind: Any) -> None:
    """Make the first input pass through two blocks, with a gradient, so that both have a backward."""
    init, forward = kind.__init__, kind.forward

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.same = nn.ModuleList([Same(), Same()])

    @functools.wraps(forward)
    def called(self: Any, input_x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = input_x + 0 * self.a
        for block in self.same:
            x = block(x)
        return forward(self, x, *args, **kwargs)

    kind.__init__, kind.forward = made, called


def _wrap_trainers() -> None:
    from transformers import Trainer

    init, from_function = Trainer.__init__, Trainer.call_model_init

    @functools.wraps(init)
    def made(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        init(self, piped(model), *args, **kwargs)

    @functools.wraps(from_function)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return piped(from_function(self, *args, **kwargs))

    Trainer.__init__, Trainer.call_model_init = made, called


def _wrap_adapters(modules: set[Any]) -> None:
    import peft

    own, move = peft.get_peft_model, GPipe.to
    GPipe.to = lambda self, *args, **kwargs: self if args == ("cpu",) else move(self, *args, **kwargs)

    @functools.wraps(own)
    def made(*args: Any, **kwargs: Any) -> Any:
        return piped(own(*args, **kwargs))

    for module in [*modules, *(each for name, each in sys.modules.items() if name.endswith("testing_common"))]:
        if getattr(module, "get_peft_model", None) is own:
            module.get_peft_model = made


def _read(path: str) -> dict[str, dict[str, Any]]:
    return {line["test"]: line for line in map(json.loads, Path(path).read_text().splitlines())}


def main(plain: str, with_pipes: str) -> None:
    """Print the outcomes of each file of tests, and every test whose outcome differs."""
    before, after = _read(plain), _read(with_pipes)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for test, line in before.items():
        counts[test.split("::")[0]][f"plain {line['outcome']}"] += 1
    for test, line in after.items():
        ran = {"in a pipe": line["pipes"] > 0, "ran in workers": line["forwards"] > 0, "refused": bool(line["refused"])}
        counts[test.split("::")[0]].update(
            [f"piped {line['outcome']}", *(name for name, holds in ran.items() if holds)]
        )
    for file, each in counts.items():
        print(file, dict(sorted(each.items())))
    for test in sorted(before.keys() & after.keys()):
        if before[test]["outcome"] != after[test]["outcome"]:
            print(test, before[test]["outcome"], "->", after[test]["outcome"], after[test]["error"])


if __name__ == "__main__":
    main(*sys.argv[1:])
