"""``python -m profiler``: what it prints, and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from profiler.__main__ import main

MODELS = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))

class Other(nn.Module):
    pass
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "profiled_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "profiled_models", raising=False)
    return tmp_path


def test_it_prints_a_table_or_json_and_saves_a_picture(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    given = ["profiled_models:build", "--sample", "8,8", "--timeout", "0.01"]
    assert main([*given, "--svg", "layers.svg"]) == 0
    assert "Linear" in capsys.readouterr().out
    assert (folder / "layers.svg").read_text().startswith("<svg")
    assert main([*given, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere:build", "--sample", "8,8"], "cannot import 'nowhere'"),
        (["profiled_models:Other", "--sample", "8,8"], "expected an nn.Sequential"),
        (["profiled_models:build", "--sample", "8;8"], "expected a shape"),
        (["profiled_models:build", "--sample", "8,3"], "shapes cannot be multiplied"),
        (["profiled_models:build", "--sample", "8,8", "--device", "gpu"], "gpu"),
        (["profiled_models:build", "--sample", "8,8", "--chunks", "0"], "chunks"),
        (["profiled_models:build", "--sample", "8,8", "--timeout", "0.01", "--svg", "no/folder.svg"], "no/folder.svg"),
    ],
)
def test_what_cannot_be_used_ends_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("target", ["no/layers.svg", ".", "profiled_models.py/layers.svg"])
def test_a_picture_that_cannot_be_saved_is_refused_before_the_work(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profiler.__main__.profile", lambda *_, **__: pytest.fail("worked"))
    assert main(["profiled_models:build", "--sample", "8,8", "--svg", target]) == 2
    assert f"svg: cannot write '{target}'" in capsys.readouterr().err


def test_without_a_device_the_picture_is_of_flops(folder: Path) -> None:
    assert main(["profiled_models:build", "--sample", "8,8", "--device", "meta", "--svg", "layers.svg"]) == 0
    assert "flops of 3 layers" in (folder / "layers.svg").read_text()


@pytest.mark.parametrize("columns", [40, 60, 200])
def test_lines_fit_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["profiled_models:build", "--sample", "8,8", "--timeout", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    heads = [word for line in lines if line.startswith("layer") for word in line.split()[2:]]
    assert heads == ["forward", "backward", "parameters", "buffers", "saved", "output", "peak", "FLOPs"]


@pytest.mark.parametrize(
    "text", ["80Gb", "8x80", "4:int8:1000", "4:float32:3", "4:int64:0", "4:int65", "4,,3", "99999999,99999999", "1,2:"]
)
def test_a_sample_that_means_nothing_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiled_models:build", "--sample", text]) == 2
    assert capsys.readouterr().err.startswith("profiler: sample: ")
