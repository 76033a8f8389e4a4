"""Known layers that mix the rows of a micro-batch are reported once, if they are trained that way."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from ..layers import piped, rows


def layer(module: str, name: str, **attributes: Any) -> nn.Module:
    """A linear layer of a class with this name."""
    made = type(name, (nn.Linear,), {"__module__": module, "__qualname__": name})(3, 3)
    vars(made).update(attributes)
    return made


def of_float8(granularity: str) -> nn.Module:
    scales = SimpleNamespace(scaling_granularity=SimpleNamespace(name=granularity))
    return layer("torchao.float8.float8_linear", "Float8Linear", config=SimpleNamespace(cast_config_input=scales))


def told(caplog: pytest.LogCaptureFixture, *layers: nn.Module, chunks: int = 2, training: bool = True) -> list[str]:
    pipe = piped(nn.Sequential(*layers).double().train(training), [len(layers)], chunks=chunks)
    with caplog.at_level(logging.WARNING, "gpipe"):
        for _ in range(2):
            pipe.step(rows(), loss_fn=lambda output: output.square().mean(), reduction="mean")
    pipe.close()
    return [record.getMessage() for record in caplog.records if "all rows" in record.getMessage()]


def test_they_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    lily = layer("peft.tuners.lily.layer", "Linear")
    (message,) = told(caplog, nn.Linear(3, 3), of_float8("TENSORWISE"), lily)
    assert "layer '1'" in message
    assert "Float8Linear" in message
    assert "as do 1 more" in message


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (of_float8("AXISWISE"), {}),
        (nn.Linear(3, 3), {}),
        (of_float8("TENSORWISE"), {"chunks": 1}),
        (of_float8("TENSORWISE"), {"training": False}),
    ],
    ids=["by rows", "another layer", "one micro-batch", "evaluation"],
)
def test_nothing_is_said_of(made: nn.Module, options: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, made, **options) == []
