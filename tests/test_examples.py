"""The examples run, in sizes that take a second."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .examples import example, number

for needed in ("rich", "sklearn"):
    pytest.importorskip(needed, reason=f"the examples need {needed}")

digits = example("digits")


class TestDigits:
    def test_it_trains_through_a_pipeline_and_tells_what_came_of_it(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        page = tmp_path / "step.html"
        tiny = ["--width", "8", "--batch", "128", "--epochs", "2", "--chunks", "3", "--seconds", "0"]
        digits.main([*tiny, "--devices", "cpu", "cpu", "cpu", "--checkpoint", "always", "--timeline", str(page)])
        told = capsys.readouterr().out
        assert "Balance" in told
        assert "pipeline of 3 stages" in told
        assert number(r"seen in training: ([\d.]+)%", told) > 20  # chance is 10
        assert number(r"by at most ([\d.e-]+) of the largest", told) < 1e-4
        assert number(r" 1F1B │.*?(\d+)%", told) <= number(r" fill-drain │.*?(\d+)%", told) < 100
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
