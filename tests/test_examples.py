"""The examples run, in sizes that take a second."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from .examples import check_comparison, example, numbers

for needed in ("rich", "sklearn", "PIL"):
    if find_spec(needed) is None:  # imported by the examples themselves: it takes seconds
        pytest.skip(f"the examples need {needed}", allow_module_level=True)

TINY = {
    "digits": (
        "--width 8 --batch 64 --epochs 1 --chunks 3 --seconds 0 --devices cpu cpu cpu --checkpoint always",
        r"unseen digits +│ ([\d.]+)% +│ ([\d.]+)%",
    ),
    "unet": (
        "--steps 2 --batch 8 --size 16 --channels 4 --levels 2 --chunks 4",
        r"PSNR without noise +│ ([\d.-]+) dB +│ ([\d.-]+) dB",
    ),
    "amoebanet": ("--epochs 1 --batch 128 --cells 2 --channels 4", r"unseen digits +│ ([\d.]+)% +│ ([\d.]+)%"),
    "tagger": ("--steps 2 --batch 8 --length 16 --width 8 --layers 2", r"textwrap.py +│ ([\d.]+)% +│ ([\d.]+)%"),
}


@pytest.mark.parametrize("name", TINY)
def test_example_trains_like_plain_model(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options, score = TINY[name]
    picture = tmp_path / "step.svg"
    example(name).main([*options.split(), "--timeline", str(picture)])
    told = capsys.readouterr().out
    without, within = numbers(score, told)
    assert without == pytest.approx(within, abs=0.02)
    check_comparison(told)
    assert picture.read_text().startswith("<svg")
