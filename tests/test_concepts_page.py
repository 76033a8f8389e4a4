"""The pictures on the page about concepts match the library's own drawing."""

from pathlib import Path

from docs.pictures import concepts


def test_pictures_of_the_page_are_current(tmp_path: Path) -> None:
    concepts.main(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == set(concepts.drawn())
    for picture in tmp_path.iterdir():
        assert picture.read_bytes() == (concepts.HERE / picture.name).read_bytes()
        assert f"pictures/{picture.name}" in (concepts.HERE.parent / "concepts.md").read_text(encoding="utf-8")
