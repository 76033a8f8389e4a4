"""The examples run, in sizes that take a second."""

from __future__ import annotations

from pathlib import Path

import pytest

from .examples import check_comparison, example, number, numbers

for needed in ("rich", "sklearn", "PIL"):
    pytest.importorskip(needed, reason=f"the examples need {needed}")

digits = example("digits")
unet = example("unet")
amoebanet = example("amoebanet")
tagger = example("tagger")


class TestDigits:
    def test_it_trains_through_a_pipeline_and_tells_what_came_of_it(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        page = tmp_path / "step.html"
        tiny = ["--width", "8", "--batch", "64", "--epochs", "1", "--chunks", "3", "--seconds", "0"]
        digits.main([*tiny, "--devices", "cpu", "cpu", "cpu", "--checkpoint", "always", "--timeline", str(page)])
        told = capsys.readouterr().out
        assert "Balance" in told
        assert "pipeline of 3 stages" in told
        without, within = numbers(r"unseen digits +│ ([\d.]+)% +│ ([\d.]+)%", told)
        assert without == within > 20  # chance is 10
        check_comparison(told)
        assert page.read_text().startswith("<!doctype html>")


class TestUNet:
    def test_it_trains_through_a_pipeline_as_the_plain_model_would(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        picture = tmp_path / "step.svg"
        tiny = ["--steps", "2", "--batch", "8", "--size", "16", "--channels", "4", "--levels", "2", "--chunks", "4"]
        unet.main([*tiny, "--timeline", str(picture)])
        told = capsys.readouterr().out
        assert 19.5 < number(r"with noise has a PSNR of ([\d.]+) dB", told) < 20.5
        without, within = numbers(r"PSNR without noise +│ ([\d.-]+) dB +│ ([\d.-]+) dB", told)
        assert without == pytest.approx(within, abs=0.02)
        check_comparison(told)
        assert picture.read_text().startswith("<svg")


class TestAmoebaNet:
    def test_it_trains_through_a_pipeline_as_the_plain_model_would(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        picture = tmp_path / "step.svg"
        amoebanet.main(
            ["--epochs", "1", "--batch", "128", "--cells", "2", "--channels", "4", "--timeline", str(picture)]
        )
        told = capsys.readouterr().out
        without, within = numbers(r"unseen digits +│ ([\d.]+)% +│ ([\d.]+)%", told)
        assert without == within
        check_comparison(told)
        assert picture.read_text().startswith("<svg")


class TestTagger:
    def test_it_trains_through_a_pipeline_as_the_plain_model_would(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        picture = tmp_path / "step.svg"
        tiny = ["--steps", "2", "--batch", "8", "--length", "16", "--width", "8", "--layers", "2"]
        tagger.main([*tiny, "--timeline", str(picture)])
        told = capsys.readouterr().out
        without, within = numbers(r"textwrap.py +│ ([\d.]+)% +│ ([\d.]+)%", told)
        assert without == pytest.approx(within, abs=0.02)
        check_comparison(told)
        assert picture.read_text().startswith("<svg")
