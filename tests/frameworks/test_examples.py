"""The examples that need transformers run, in sizes that take seconds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..examples import check_comparison, example, number, numbers

for needed in ("rich", "transformers", "tokenizers"):
    pytest.importorskip(needed, reason=f"the example needs {needed}")

ROOT = Path(__file__).parents[2]
finetune = example("finetune")
TINY = ["--batch", "6", "--chunks", "3", "--length", "16", "--width", "32", "--layers", "2", "--vocabulary", "300"]

pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning")]


def test_loss_falls_and_resumes_with_different_stages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    finetune.main([*TINY, "--steps", "24", "--timeline", str(picture)])
    told = capsys.readouterr().out
    assert number(r"now: ([\d.]+)", told) < number(r"at first: ([\d.]+)", told) - 0.2
    saved, loaded = number(r"when saved: ([\d.]+)", told), number(r"when loaded[^:]*: ([\d.]+)", told)
    assert saved == pytest.approx(loaded, abs=2e-3)
    check_comparison(told)
    assert picture.read_text().startswith("<svg")


def test_training_is_equal_plain_and_distributed() -> None:
    path, options = ROOT / "examples" / "train_distributed.py", [*TINY, "--steps", "5"]
    plain, pipe = (example(path.stem).main([*options, *more]) for more in (["--plain"], []))
    told = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path), *options],
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    ).stdout
    shown = [[f"{losses[k]:.4f}" for k in (0, -1)] for losses in (plain, pipe)]
    assert shown[0] == shown[1] == re.findall(r"│ +\d+ │ ([\d.]+) │", told)


@pytest.mark.parametrize("bits", [4, 32])
def test_adapters_train_equally_pipelined_and_sequential(
    bits: int, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="the example needs peft")
    qlora = example("qlora")
    if bits == 4:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    else:
        monkeypatch.setattr(qlora, "is_bitsandbytes_available", lambda: False)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)  # of the process of the tests
    sizes = "--batch 6 --chunks 3 --length 8 --width 64 --layers 2 --vocabulary 64 --steps 2"
    qlora.main([*sizes.split(), "--timeline", str(tmp_path / "step.svg")])
    told = capsys.readouterr().out
    assert f"Weights in {bits} bits" in told
    assert numbers(r"micro-batches +│ +(\d+) │ +(\d+)", told) == (1, 3)
    assert number(r"the bound with 2 devices is (\d+.\d+)", told) == 1.5
    assert number(r"differ by at most ([\d.e+-]+)", told) < 1e-5
    assert (tmp_path / "step.svg").read_text().startswith("<svg")
