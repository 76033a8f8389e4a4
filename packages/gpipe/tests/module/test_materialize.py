"""A model that was built on ``meta`` gets its data stage by stage, from files too, and is then the plain model."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipe import GPipe
from profiler import AllocationTracker

from ..in_rows import InRows
from ..layers import Layer, running
from ..models import CHANNELS, PARTS, WIDTH, counts
from ..schedules import balances

SLOW = settings(suppress_health_check=[HealthCheck.too_slow])
# Their constructors compute with the values of their weights, which torch cannot do on meta.
COMPUTED = ("orthogonal",)
# Layers that own parameters or buffers, but have no reset_parameters().
HELPLESS = ("weight norm", "orthogonal", "spectral norm", "buffers", "unused parameter")


@st.composite
def balanced(draw: st.DrawFn, without: tuple[str, ...] = COMPUTED) -> tuple[list[str], list[int]]:
    """Names of parts, and a balance of their layers."""
    names = draw(st.lists(st.sampled_from([name for name in PARTS if name not in without]), min_size=1, max_size=6))
    return names, draw(balances(len(built(names)), 4))


def built(names: list[str]) -> nn.Sequential:
    return nn.Sequential(*(layer for name in names for layer in PARTS[name].layers()))


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def piped(model: nn.Sequential, balance: list[int], **options: Any) -> GPipe:
    return GPipe(model, balance, devices=["cpu"] * len(balance), **options)


def assert_equal_state(found: nn.Module, expected: nn.Module) -> None:
    torch.testing.assert_close(dict(found.state_dict()), dict(expected.state_dict()), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        dict(found.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0, equal_nan=True
    )


def looks(model: nn.Module) -> dict[str, Any]:
    """Return everything that must be unchanged after an error: objects and their metadata, but not their values."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "tensors": {
            name: (id(t), type(t), t.device, t.dtype, None if is_lazy(t) else t.shape, t.requires_grad)
            for name, t in tensors
        },
        "modules": {name: (id(m), m.training, sorted(vars(m))) for name, m in model.named_modules()},
    }


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 2))


@SLOW
@given(balanced(), st.integers(0, 99), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_a_state_dict_makes_the_plain_model(drawn: Any, seed: int, inline: bool, dtype: torch.dtype) -> None:
    names, balance = drawn
    torch.manual_seed(seed)
    plain, meta = built(names).to(dtype), on_meta(lambda: built(names)).to(dtype)
    for model in (plain, meta):
        model.train(seed % 2 == 0)
        for parameter in list(model.parameters())[:: 1 + seed % 3]:
            parameter.requires_grad_(False)
    parameters, modes = list(meta.parameters()), [module.training for module in meta.modules()]
    pipe = piped(meta, balance, init=plain.state_dict())
    assert_equal_state(pipe, plain)
    assert all(a is b for a, b in zip(pipe.parameters(), parameters, strict=True))
    assert [module.training for module in meta.modules()] == modes
    assert [p.requires_grad for p in pipe.parameters()] == [p.requires_grad for p in plain.parameters()]
    x = torch.rand(3, CHANNELS, WIDTH, dtype=dtype)
    with running(inline):
        torch.testing.assert_close(pipe.eval()(x), plain.eval()(x))


def uniform(module: nn.Module) -> None:
    """Initialises what any module owns."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        with torch.no_grad():
            tensor.uniform_() if tensor.is_floating_point() else tensor.zero_()


@SLOW
@pytest.mark.parametrize("reset", [True, False])
@given(st.data(), st.integers(0, 99))
def test_random_initialization_matches_plain_model(reset: bool, data: st.DataObject, seed: int) -> None:
    """Values are initialized by constructors, or by a function applied to all modules in order."""
    # A frozen batch norm initializes its running mean randomly, which is not a reset.
    without = (*HELPLESS, "frozen batch norm") if reset else ("orthogonal", "weight norm", "spectral norm")
    names, balance = data.draw(balanced(without))
    torch.manual_seed(seed)
    plain = built(names) if reset else on_meta(lambda: built(names)).to_empty(device="cpu").apply(uniform)
    torch.manual_seed(seed)
    seen: list[nn.Module] = []
    meta = on_meta(lambda: built(names))
    pipe = piped(meta, balance, init="reset" if reset else lambda module: (seen.append(module), uniform(module)))
    assert_equal_state(pipe, plain)
    expected: list[nn.Module] = []
    for layer in meta:
        layer.apply(expected.append)
    assert seen == ([] if reset else expected)


def breaks(module: nn.Module) -> None:
    uniform(module)
    module.note = "seen"
    if isinstance(module, nn.Linear) and module.out_features == 2:
        module.weight = nn.Parameter(torch.ones(2, 8))
        raise ArithmeticError("in the middle")


def half(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        uniform(module)


REFUSED: dict[str, tuple[Callable[[], nn.Sequential], Any, type[Exception], str]] = {
    "none": (two, None, ValueError, r"'0\.weight' of partition 0 is on 'meta'.*init=.*'reset'.*state dict.*path"),
    "raises": (two, breaks, ArithmeticError, "in the middle"),
    "leaves out": (two, half, ValueError, r"left '1\.weight', '1\.bias', '1\.running_mean'"),
    "missing and unexpected": (
        two,
        {k: torch.ones(3) for k in [*two().state_dict(), "a", "b"] if k not in ("0.weight", "3.bias")},
        ValueError,
        r"missing: '0\.weight', '3\.bias'; unexpected: 'a', 'b'; if the checkpoint contains more",
    ),
    "misshapen": (two, {**two().state_dict(), "3.weight": torch.ones(3)}, RuntimeError, r"size mismatch for 3\.weight"),
    "no reset": (
        lambda: nn.Sequential(counts(), nn.Linear(1, 1)),
        "reset",
        ValueError,
        r"left '0\.calls'.* uninitialized",
    ),
    "nobody computes a buffer": (
        lambda: nn.Sequential(nn.Linear(1, 1), rotary()),
        nn.Sequential(nn.Linear(1, 1)).state_dict(),
        ValueError,
        r"left '1\.inv_freq' uninitialized; .* or create them outside",
    ),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(3)),
        "reset",
        ValueError,
        r"'0\.weight' to be a plain tensor; got a Uninit.*lazy, call",
    ),
    "a flag": (two, True, TypeError, "init must be 'reset', a function"),
    "another type": (two, 3, TypeError, "init must be 'reset', a function"),
}


def rotary() -> nn.Module:
    module = nn.Module()
    module.register_buffer("inv_freq", torch.arange(4.0), persistent=False)
    return module


@pytest.mark.parametrize("what", REFUSED)
def test_errors_leave_model_unchanged(what: str) -> None:
    make, init, error, message = REFUSED[what]
    model = on_meta(make)
    model.append(nn.Linear(2, 2))  # materialized, at the end
    if isinstance(init, Mapping):
        init = {**init, f"{len(model) - 1}.weight": torch.ones(2, 2), f"{len(model) - 1}.bias": torch.ones(2)}
    before = looks(model)
    with pytest.raises(error, match=message):
        piped(model, [len(model) - 1, 1], init=init)
    assert looks(model) == before


class Resets(nn.Linear):
    """Has a buffer that its constructor computes, and a reset method."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("scale", torch.arange(8.0), persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):
            torch.arange(8.0, out=self.scale)


def test_buffers_may_be_made_by_a_reset() -> None:
    plain, model = nn.Sequential(Resets(), nn.Linear(8, 2)), on_meta(lambda: nn.Sequential(Resets(), nn.Linear(8, 2)))
    assert_equal_state(piped(model, [1, 1], init=plain.state_dict()), plain)
    assert isinstance(piped(on_meta(lambda: nn.Sequential(Resets())), [1], init="reset")[0].scale, Tensor)


def test_init_is_for_models_on_meta() -> None:
    with pytest.raises(ValueError, match="is already initialized"):
        piped(two(), [2, 2], init="reset")
    with pytest.raises(ValueError, match="'meta'"):
        GPipe(on_meta(two), [2, 2], devices=["meta"] * 2, init="reset")
    piped(nn.Sequential(nn.ReLU(), nn.Tanh()), [1, 1], init="reset")  # has nothing to initialise


def tied() -> nn.Module:
    embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embed.weight
    return Layer(lambda s, x: s.head(s.embed(x)), embed=embed, head=head)


@pytest.mark.parametrize("missing", [None, "0.embed.weight", "0.head.weight"])
def test_tied_weights_stay_tied(missing: str | None) -> None:
    plain, model = nn.Sequential(tied(), nn.ReLU()), on_meta(lambda: nn.Sequential(tied(), nn.ReLU()))
    state = {name: value for name, value in plain.state_dict().items() if name != missing}
    pipe = piped(model, [1, 1], init=state)
    assert pipe[0].embed.weight is pipe[0].head.weight
    assert_equal_state(pipe, plain)


def test_at_most_one_extra_layer_in_memory() -> None:
    model = on_meta(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)) for _ in range(8))))
    sizes = [sum(tensor.nbytes for tensor in layer.state_dict().values()) for layer in model]
    with AllocationTracker() as tracker:
        pipe = piped(model, [3, 5], init="reset")
        held = tracker.alive()
    assert held == sum(sizes)
    assert tracker.peak <= sum(sizes) + max(sizes)
    assert all(parameter.device.type == "cpu" for parameter in pipe.parameters())


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
    """Save a state dict in the format of Hugging Face's ``save_pretrained()``: several files and an index."""
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


@pytest.mark.parametrize("save", KINDS, ids=lambda save: save.__name__)
@pytest.mark.parametrize("text", [False, True])
def test_the_model_is_what_was_saved(save: Save, text: bool, tmp_path: Path) -> None:
    plain = two()
    nn.init.uniform_(plain[1].running_mean)
    path = save(plain.state_dict(), tmp_path)
    pipe = piped(on_meta(two), [1, 3], init=str(path) if text else path, chunks=2)
    torch.testing.assert_close(dict(pipe.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
    pipe.step(torch.rand(4, 4), torch.rand(4, 2), loss_fn=nn.functional.mse_loss)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"init='rest': there is no such file or folder; use init='reset' for"):
        piped(on_meta(two), [1, 3], init="rest")
    with pytest.raises(FileNotFoundError, match=r"snapshot_download\(...\) for a model from the Hugging Face hub"):
        piped(on_meta(two), [1, 3], init="owner/name")
    with pytest.raises(ValueError, match=r"has no checkpoint: expected model\.safetensors\.index\.json or "):
        piped(on_meta(two), [1, 3], init=tmp_path)
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with pytest.raises(TypeError, match=r"init must be .* a state dict, .* got Tensor"):
        piped(on_meta(two), [1, 3], init=tmp_path / "tensor.pt")


class Halves(nn.Parameter):
    """A weight that a move to a device packs: as codes in a column, and a scale."""

    scale: Tensor | None

    def __new__(cls, data: Tensor, scale: Tensor | None = None) -> "Halves":
        made = Tensor._make_subclass(cls, data, False)
        made.scale = scale
        return made

    @classmethod
    def from_prequantized(
        cls, data: Tensor, quantized_stats: dict[str, Tensor], requires_grad: bool, device: Any, module: Any
    ) -> "Halves":
        assert [*quantized_stats] == ["scale"]
        return cls(data.to(device), quantized_stats["scale"].to(device))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.scale is None and not self.is_meta:
            assert not self.isnan().any()  # no memory without values is packed
            self.scale = self.data.abs().max() / 100
            self.data = (self.data / self.scale).round().to(torch.int8).reshape(-1, 1)
            return self
        return super().to(*args, **kwargs)


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = Halves(torch.randn(6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.reshape(6, 6) * self.weight.scale) + self.bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight.scale is not None:
            destination[f"{prefix}weight.scale"] = self.weight.scale


class InHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Halved() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


FORMS: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(*(Halved() for _ in range(4))),
    "model": InHalves,
    "rows": lambda: nn.Sequential(*(InRows() for _ in range(4))),
}


@pytest.mark.parametrize("saved", ["packed", "used", "plain"])
@pytest.mark.parametrize("form", FORMS)
def test_packed_weights(form: str, saved: str) -> None:
    """They are read as they are, or packed as they arrive, layer by layer."""
    plain, x = FORMS[form](), torch.randn(4, 6)
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    plain.to("cpu")
    if saved == "used":
        plain(x)
    if saved != "plain":
        state = dict(plain.state_dict())
    model = on_meta(FORMS[form])
    pipe = GPipe(model, [2, 2], devices=["cpu"] * 2, init=state)
    assert pipe.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(pipe(x), plain(x))


@pytest.mark.parametrize(("form", "part"), [("layers", "weight.scale"), ("rows", "SCB")])
def test_packed_checkpoint_of_unquantized_model_raises(form: str, part: str) -> None:
    plain = FORMS[form]().to("cpu")
    model = on_meta(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))))
    with pytest.raises(ValueError, match=rf"unexpected: '0\.{part}'.*needs a model with quantized layers"):
        GPipe(model, [2, 2], devices=["cpu"] * 2, init=plain.state_dict())


def test_a_packed_checkpoint_without_scales() -> None:
    state = {name: value for name, value in FORMS["rows"]().to("cpu").state_dict().items() if "SCB" not in name}
    with pytest.raises(ValueError, match=r"unexpected: '0\.weight_format'"):
        GPipe(on_meta(FORMS["rows"]), [2, 2], devices=["cpu"] * 2, init=state)
