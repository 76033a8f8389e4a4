"""State dicts in files and folders are read as they are in memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import GPipe

from .test_materialize import on_meta, two

Save = Callable[[dict[str, Tensor], Path], Path]


def torch_file(state: dict[str, Tensor], folder: Path) -> Path:
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


def safetensors_file(state: dict[str, Tensor], folder: Path) -> Path:
    pytest.importorskip("safetensors.torch").save_file(state, folder / "any.safetensors")
    return folder / "any.safetensors"


def whole_folder(state: dict[str, Tensor], folder: Path) -> Path:
    safetensors_file(state, folder).rename(folder / "model.safetensors")
    return folder


def indexed_folder(state: dict[str, Tensor], folder: Path) -> Path:
    """As ``save_pretrained()`` of Hugging Face writes it: several files, and an index of them."""
    save = pytest.importorskip("safetensors.torch").save_file
    names = list(state)
    parts = {f"model-{k}-of-3.safetensors": names[k::3] for k in range(3)}
    for file, part in parts.items():
        save({name: state[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def index_file(state: dict[str, Tensor], folder: Path) -> Path:
    return indexed_folder(state, folder) / "model.safetensors.index.json"


KINDS: list[Save] = [torch_file, safetensors_file, whole_folder, indexed_folder, index_file]


def piped(init: Any) -> GPipe:
    return GPipe(on_meta(two), [1, 3], devices=["cpu", "cpu"], chunks=2, init=init)


@pytest.mark.parametrize("save", KINDS, ids=lambda save: save.__name__)
@pytest.mark.parametrize("text", [False, True])
def test_the_model_is_what_was_saved(save: Save, text: bool, tmp_path: Path) -> None:
    plain = two()
    nn.init.uniform_(plain[1].running_mean)
    path = save(plain.state_dict(), tmp_path)
    pipe = piped(str(path) if text else path)
    torch.testing.assert_close(dict(pipe.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    pipe.step(torch.rand(4, 4), torch.rand(4, 2), loss_fn=nn.functional.mse_loss)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"init='rest': there is no such file or folder \(init='reset' is"):
        piped("rest")
    with pytest.raises(FileNotFoundError, match=r"snapshot_download\(...\) for a model of Hugging Face's hub"):
        piped("owner/name")
    with pytest.raises(ValueError, match=r"has no checkpoint: expected model\.safetensors\.index\.json or "):
        piped(tmp_path)
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with pytest.raises(TypeError, match=r"init must be .* a state dict, .* got Tensor"):
        piped(tmp_path / "tensor.pt")
