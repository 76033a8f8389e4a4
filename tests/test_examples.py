"""The examples run, in sizes that take a second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe.skip import inspect_skip_layout

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

    def test_no_digit_is_in_both_halves(self) -> None:
        (train, train_labels), (test, test_labels) = digits.load()
        assert len(train) == len(train_labels)
        assert len(test) == len(test_labels)
        assert len(train) + len(test) == 1797
        assert train[0].shape == test[0].shape == (1, 8, 8)
        assert (train.min(), train.max()) == (0, 1)

    def test_the_network_has_twelve_layers_and_ten_answers(self) -> None:
        model = digits.network(8)
        assert len(model) == 12
        assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)

    @given(st.integers(1, 40), st.integers(1, 3), st.data())
    def test_no_digit_is_seen_twice_in_an_epoch(self, count: int, epochs: int, data: st.DataObject) -> None:
        batch = data.draw(st.integers(1, count))
        images, labels = torch.arange(count), torch.arange(count) * 10
        seen = list(digits.mini_batches((images, labels), epochs, batch))
        assert len(seen) == epochs * (count // batch)
        for some_images, some_labels in seen:
            assert len(some_images) == batch
            assert torch.equal(some_images * 10, some_labels)
        for start in range(0, len(seen), count // batch):
            epoch = torch.cat([some_images for some_images, _ in seen[start : start + count // batch]])
            assert len(epoch.unique()) == len(epoch)


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

    def test_its_skips_go_past_the_stages_between(self) -> None:
        model = unet.unet(4, 2)
        layout = inspect_skip_layout([nn.Sequential(layer) for layer in model])
        assert [(route.source, route.target) for route in layout.routes] == [(0, 7), (1, 5), (2, 4)]
        assert model(torch.zeros(2, 3, 16, 16)).shape == (2, 3, 16, 16)

    @given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.data())
    def test_crops_are_squares_of_the_picture(self, height: int, width: int, count: int, data: st.DataObject) -> None:
        size = data.draw(st.integers(1, min(height, width)))
        picture = torch.arange(3.0 * height * width).view(1, 3, height, width)
        for crop in unet.crops(picture, count, size):
            top, left = divmod(int(crop[0, 0, 0]), width)
            assert torch.equal(crop, picture[0, :, top : top + size, left : left + size])


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

    @pytest.mark.parametrize("cells", [1, 2, 5])
    def test_every_cell_takes_the_outputs_of_the_two_before(self, cells: int) -> None:
        model = amoebanet.amoebanet(cells, 4)
        assert sum(type(layer).__name__ == "Cell" for layer in model) == cells
        assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


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

    def test_each_letter_has_the_tag_of_its_token(self) -> None:
        source = 'if x > 1:\n    y = "a"  # b\n'
        kinds = {"k": "keyword", "n": "name", "o": "operator", "1": "number", "s": "string", "c": "comment"}
        expected = "kk n o 1o     n o sss  ccc "
        assert tagger.tagged(source) == [tagger.TAGS[kinds.get(letter, "space")] for letter in expected]
