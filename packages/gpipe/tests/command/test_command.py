"""The command line: what it prints, what it leaves behind, and how it ends."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("cyclopts", reason="the command line is an extra")

from gpipe._command import run

MODELS = """
import torch
from torch import nn

def clean():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))

def wide():
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4), nn.GELU())

def root(output, target):
    return (output - target).square().mean().sqrt()

def mixing():
    return nn.Sequential(nn.Linear(8, 8), nn.Softmax(0))

def failing():
    raise RuntimeError("no weights")

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x

def batch():
    return torch.zeros(8, 8)

def broken_batch():
    return 1 / 0

answer = 42

def leaving():
    raise SystemExit(0)

class Shouts(nn.Module):
    def forward(self, x):
        raise RuntimeError("one line [bold]\\nand another")

def shouting():
    return nn.Sequential(Shouts())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of models."""
    (tmp_path / "some_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_models", raising=False)
    return tmp_path


def test_check_exits_with_1_on_findings(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run(["check", "some_models:clean", "--sample", "8,8", "--html", "check.txt"]) == 0
    told = capsys.readouterr().out
    assert "nothing found: 3 layers, 8 rows in 4 micro-batches" in told
    assert (folder / "check.txt").read_text() == told
    assert run(["check", "some_models:mixing", "--sample", "8,8", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(finding["code"], finding["layer"]) for finding in found["findings"]] == [("mixes-rows", "1")]
    given = ["--sample", "tokens=8,5:int64:16", "--loss", "torch.nn.functional:mse_loss", "--loss-target", "8,5,8"]
    assert run(["check", "some_models:Blocks", *given]) == 0
    given[3] = "some_models:root"
    assert run(["check", "some_models:Blocks", *given]) == 0
    assert "the loss is computed once" in capsys.readouterr().out
    assert run(["check", "some_models:Blocks", *given, "--reduction", "mean"]) == 1


def test_profile_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["profile", "some_models:clean", "--sample", "some_models:batch", "--timeout", "0.01"]
    assert run(given) == 0
    assert "Linear" in capsys.readouterr().out
    assert run([*given, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 3


def test_simulate_predicts_a_step(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    given = ["--sample", "8,8", "--devices", "cpu", "cpu", "--chunks", "4", "--timeout", "0.01", "--html", "run.html"]
    assert run(["simulate", "some_models:clean", *given, "--checkpoint", "always"]) == 0
    assert "2 stages × 4 micro-batches" in capsys.readouterr().out
    assert "<!doctype html>" in (folder / "run.html").read_text()


@pytest.mark.parametrize("command", [["simulate", "--timeout", "0.01"], ["timeline"]])
def test_stages_share_workers_as_devices_say(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [*command, "some_models:wide", "--sample", "8,8", "--chunks", "4", "--schedule", "zbv", "--devices"]
    assert run([*given, "cpu:0", "cpu:1", "cpu:1", "cpu:0"]) == 0
    assert "4 stages × 4 micro-batches" in capsys.readouterr().out
    assert run([*given, "cpu:0", "cpu:1", "cpu:0", "cpu:1"]) == 2
    assert "'zbv' needs its stages down all workers and up again" in capsys.readouterr().err


def test_plan_prints_report_and_saves_page(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    given = ["plan", "some_models:clean", "--sample", "8,8", "--devices", "cpu", "cpu", "--chunks", "2", "4", "--quick"]
    assert run([*given, "--html", "plan.html", "--memory", "1GB"]) == 0
    assert "balance" in capsys.readouterr().out
    assert "<!doctype html>" in (folder / "plan.html").read_text().lower()
    assert run([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    given += ["--loss", "some_models:root", "--loss-target", "8,4", "--json"]
    for reduction, whole in ([], True), (["--reduction", "mean"], False):
        assert run([*given, *reduction]) == 0
        assert json.loads(capsys.readouterr().out)["whole_loss"] == whole


def test_plan_ends_with_1_if_nothing_fits(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    given = ["--sample", "8,8", "--devices", "cpu", "cpu", "--memory", "1KB", "--quick", "--html", "plan.html"]
    assert run(["plan", "some_models:clean", *given]) == 1
    assert "memory" in capsys.readouterr().out
    assert run(["plan", "some_models:clean", *given, "--json"]) == 1
    assert json.loads(capsys.readouterr().out).keys() == {"error", "device", "short", "changes"}
    assert not (folder / "plan.html").exists()


def test_plan_takes_devices_that_are_not_there(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    given = ["plan", "some_models:clean", "--sample", "16,8", "--fake", "2x1GB", "--latency", "0"]
    assert run([*given, "--bandwidth", "100GB", "--html", "plan.html"]) == 0
    told = capsys.readouterr().out
    assert "estimated, not measured" in told
    assert "links send 100 GB/s" in told
    assert "<!doctype html>" in (folder / "plan.html").read_text().lower()
    assert run([*given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == ["fake 1GB"] * 2
    assert run([*given[:5], "1GB", "2GB", "--speeds", "1", "2", "--json"]) == 0
    assert {*json.loads(capsys.readouterr().out)["devices"]} == {"fake 1GB", "fake 2GB"}
    for text in ("1GB", "H100", "1x1GB"):
        assert run([*given[:5], text, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["devices"] == [f"fake {text.removeprefix('1x')}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "some_models:clean"], "sample"),
        (["check", "no_such_module:build", "--sample", "8,8"], "No module named"),
        (["check", "some_models", "--sample", "8,8"], "expected package.module:name"),
        (["check", "some_models:failing", "--sample", "8,8"], "no weights"),
        (["check", "some_models:clean", "--sample", "8,8:float32:5"], "expected a shape"),
        (["check", "some_models:clean", "--sample", "some_models:broken_batch"], "ZeroDivisionError"),
        (["check", "some_models:clean", "--sample", "a=8,8", "8,8"], "a different name for each argument"),
        (["timeline", "some_models:clean", "--sample", "8,8", "--devices", "gpu"], "cuda"),
        (["timeline", "some_models:clean", "--sample", "8,8", "--html", "no/such/folder.html"], "cannot write"),
        (["check", "some_models:clean", "--sample", "8,8", "--html", "check.pdf"], "ends in .html or .json or .txt"),
        (["plan", "some_models:clean", "--sample", "8,8", "--fake", "1x1GB", "--devices", "cpu"], "got both"),
        (["plan", "some_models:clean", "--sample", "8,8", "--fake", "cpu"], "fake: expected hypothetical devices"),
        (["plan", "some_models:clean", "--sample", "8,8", "--fake", "cpu", "cpu"], "got cpu cpu"),
        (["plan", "some_models:clean", "--sample", "8,8", "--fake", "1GB", "cpu"], "got 1GB cpu"),
        (["plan", "some_models:clean", "--sample", "8,8", "--fake", "2xcpu"], "8xH100"),
        (["plan", "some_models:leaving", "--sample", "8,8", "--devices", "cpu"], "SystemExit"),
        (["timeline", "some_models:shouting", "--sample", "8,8", "--devices", "cpu"], "one line [bold]; and another; "),
        (["check", "some_models:failing", "--sample", "8,8", "--html", "folder.html"], "it is a folder"),
        (["simulate", "some_models:clean", "--sample", "8,8", "--devices"], "expected at least one"),
        (["plan", "some_models:clean", "--sample", "8,8", "--devices", "cpu", "--memory", "80"], "expected bytes"),
        (["plan", "some_models:clean", "--sample", "8,8", "--devices", "meta"], "'meta' cannot run a model"),
        (["conquer"], "conquer"),
    ],
)
def test_invalid_arguments_exit_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "folder.html").mkdir()
    assert run(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert told.err.startswith("gpipe: ")
    assert told.err.count("\n") == 1
    left = {"some_models.py", "folder.html", "__pycache__"}
    assert {file.name for file in folder.iterdir()} <= left
    assert not [*(folder / "folder.html").iterdir()]


WORDS = ["check", "plan", "some_models:clean", "--sample", "8,8", "8,8:int64", "--chunks", "-1", "--balance", "1"]
WORDS += ["--html", "no/x.html", "--json", "--devices", "cpu", "--fake", "2x", "--memory", "[/]", "🙂", "\0", ""]


@given(st.lists(st.sampled_from(WORDS), max_size=9))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_words_lead_to_a_traceback(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    status = run(words)
    told = capsys.readouterr()
    assert status in (0, 1) or (status == 2 and told.err.count("\n") == 1)
    assert "Traceback" not in told.out + told.err


def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("gpipe._command")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    monkeypatch.delitem(sys.modules, "gpipe.__main__", raising=False)
    monkeypatch.setattr(sys, "argv", ["gpipe"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("gpipe", run_name="__main__")
    assert ended.value.code == 2
    assert "gpipe-torch[cli]" in capsys.readouterr().err
