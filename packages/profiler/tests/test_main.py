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
