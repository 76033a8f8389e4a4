"""Small models of each kind of layer, and adapters of PEFT for them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gpipe import Arguments

from ..own_forward import Case, NotComparableError, of_all_rows

peft = pytest.importorskip("peft", reason="peft is not installed; see nox -s outside")

ROWS, WIDTH, WORDS, BLOCKS = 6, 12, 16, 4


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).tanh())
        return out


class Convolved(nn.Module):
    def __init__(self, dims: int, groups: int = 1) -> None:
        super().__init__()
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.up, self.down = kind(4, 8, 3, padding=1, groups=groups), kind(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.down = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.attention(x, x, x)[0])
        return out


class Bare(nn.Module):
    """A layer that holds its weight directly, like experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.weight


class Model(nn.Module):
    """Blocks between an entry and a head, which an adapter may change too."""

    def __init__(self, entry: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.entry, self.blocks, self.head = entry, nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.flatten(1))
        return out


class Words(Model):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(WORDS, WIDTH), [Square() for _ in range(BLOCKS)], nn.Linear(WIDTH, WORDS))
        self.head.weight = self.entry.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


def _model(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "words":
        return Words(), torch.arange(ROWS * 5).reshape(ROWS, 5) % WORDS
    if kind in ("dense", "square", "bare"):
        block = {"dense": Dense, "square": Square, "bare": Bare}[kind]
        blocks = [block() for _ in range(BLOCKS)]
        return Model(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 3)), torch.randn(ROWS, WIDTH)
    if kind == "attended":
        blocks = [Attended() for _ in range(BLOCKS)]
        return Model(nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(5 * WIDTH, 3)), torch.randn(ROWS, 5, WIDTH)
    dims, groups = int(kind[4]), 2 if kind.endswith("groups") else 1
    blocks = [Convolved(dims, groups) for _ in range(BLOCKS)]
    return Model(nn.Identity(), blocks, nn.Linear(4 * 4**dims, 3)), torch.randn(ROWS, 4, *[4] * dims)


class Adapter(NamedTuple):
    """A kind of adapter, its settings, and the models that it is tried on."""

    kind: str
    settings: dict[str, Any]
    models: tuple[str, ...] = ("dense",)


CONVOLVED = ("conv1", "conv2", "conv2groups", "conv3")
LAYERS = {"target_modules": ["up", "down"]}
LAST = {"target_modules": ["down"]}
ADAPTERS = {
    "LoRA": Adapter("Lora", LAYERS, ("dense", "square", *CONVOLVED)),
    "LoRA with bias": Adapter("Lora", {**LAYERS, "lora_bias": True}, ("dense", "conv2")),
    "LoRA of entry and head": Adapter("Lora", {"target_modules": ["entry", "head", "up"]}, ("dense", "words")),
    "LoRA and a saved head": Adapter("Lora", {**LAYERS, "modules_to_save": ["head"]}, ("dense", "conv2")),
    "LoRA and a saved norm": Adapter("Lora", {**LAYERS, "modules_to_save": ["norm"]}),
    "LoRA of attention": Adapter("Lora", {"target_modules": ["attention", "down"]}, ("attended",)),
    "LoRA of parameters": Adapter("Lora", {"target_modules": [], "target_parameters": ["weight"]}, ("bare",)),
    "LoRA of parameters of layers": Adapter("Lora", {**LAST, "target_parameters": ["up.weight"]}),
    "LoRA and tokens": Adapter("Lora", {**LAYERS, "trainable_token_indices": {"entry": [0, 3]}}, ("words",)),
    "rsLoRA": Adapter("Lora", {**LAYERS, "use_rslora": True}),
    "PiSSA": Adapter("Lora", {**LAYERS, "init_lora_weights": "pissa"}),
    "DoRA": Adapter("Lora", {**LAYERS, "use_dora": True}, ("dense", *CONVOLVED)),
    "DoRA of an embedding": Adapter("Lora", {"target_modules": ["entry", "up"], "use_dora": True}, ("words",)),
    "AdaLoRA": Adapter("AdaLora", {**LAYERS, "total_step": 10}),
    "IA3": Adapter("IA3", {**LAYERS, "feedforward_modules": ["down"]}, ("dense", "conv2", "conv3")),
    "LoHa": Adapter("LoHa", LAYERS, ("dense", "conv1", "conv2", "conv2groups")),
    "LoHa by parts": Adapter("LoHa", {**LAYERS, "use_effective_conv2d": True}, ("conv2",)),
    "LoKr": Adapter("LoKr", LAYERS, ("dense", "conv1", "conv2", "conv2groups")),
    "OFT": Adapter("OFT", {**LAYERS, "r": 2, "oft_block_size": 0, "use_cayley_neumann": False}, ("dense", "conv2")),
    "OFT of Neumann": Adapter("OFT", {**LAYERS, "r": 0, "oft_block_size": 4, "use_cayley_neumann": True}),
    "BOFT": Adapter("BOFT", {**LAYERS, "boft_block_size": 2}, ("square", "conv2")),
    "VeRA": Adapter("Vera", LAYERS, ("dense", "square")),
    "PVeRA": Adapter("Pvera", LAYERS),
    "FourierFT": Adapter("FourierFT", {**LAYERS, "n_frequency": 10}, ("dense", "square")),
    "HRA": Adapter("HRA", {**LAYERS, "r": 4}, ("dense", "conv2")),
    "VB-LoRA": Adapter("VBLoRA", {**LAYERS, "vector_length": 4, "num_vectors": 8}),
    "MiSS": Adapter("Miss", {**LAYERS, "r": 2}, ("dense", "square")),
    "RandLoRA": Adapter("RandLora", {**LAYERS, "randlora_alpha": 1}),
    "norms": Adapter("LNTuning", {"target_modules": ["norm"]}),
    "SHiRA": Adapter("Shira", {**LAYERS, "r": 1}),
    "super": Adapter("Supertuning", {**LAYERS, "sparsity": 0.5}),
    "C3A": Adapter("C3A", {**LAYERS, "block_size": 2}),
    "WaveFT": Adapter("WaveFT", {**LAYERS, "n_frequency": 8}),
    "RoAd": Adapter("Road", {**LAYERS, "group_size": 2, "variant": "road_2"}),
    "DeLoRA": Adapter("Delora", LAYERS),
    "PSOFT": Adapter("Psoft", {**LAYERS, "r": 4, "psoft_alpha": 4}),
    "GraLoRA": Adapter("Gralora", {**LAYERS, "r": 4, "gralora_k": 2}),
    "GLoRA": Adapter("Glora", LAYERS),
    "DEFT": Adapter("Deft", LAYERS),
    "BEFT": Adapter("Beft", LAST),
    "OSF": Adapter("OSF", LAYERS),
    "FRoD": Adapter("Frod", LAYERS),
    "Uni-LoRA": Adapter("UniLora", {**LAYERS, "theta_d_length": 101}),
    "TinyLoRA": Adapter("TinyLora", {**LAYERS, "r": 2, "u": 16}),
    "Lily": Adapter("Lily", {**LAYERS, "r": 2, "stride_A": 1, "num_B": 2}),
    "PEANuT": Adapter("Peanut", {**LAYERS, "r": 2, "depth": 0, "act_fn": "relu"}),
    "HiRA": Adapter("Hira", LAYERS, ("dense", "conv2")),
    "AdaMSS": Adapter("Adamss", {**LAYERS, "r": 4}),
    "tokens": Adapter("TrainableTokens", {"target_modules": ["entry"], "token_indices": [0, 3]}, ("words",)),
}
APART = {
    "LoRA of parameters": "torch keeps the weights that it computes for all threads together",
    "LoRA of parameters of layers": "torch keeps the weights that it computes for all threads together",
    "Lily": "its router depends on the full batch",
    "OSF": "a copy of it loses the hooks on parameters, and so computes a different function",
    "PVeRA": "it draws random numbers",
}
"""Adapters whose plain model does not equal itself when split, copied, or run in several threads."""


def names() -> Iterator[tuple[str, str]]:
    """Yield adapters, and models that they are for, if a pipe can be compared."""
    for name, adapter in ADAPTERS.items():
        for model in adapter.models if name not in APART else ():
            yield name, model


def case(name: str, model: str) -> Case:
    """A model with an adapter whose numbers matter: some begin with zeros, and would hide what they get.

    Raises:
        NotComparableError: this version of PEFT has no such adapter.
    """
    adapted, inputs = made(ADAPTERS[name], model)
    return Case(adapted, Arguments((inputs,), {}), of_all_rows)


def made(adapter: Adapter, model: str) -> tuple[Any, Tensor]:
    """Return a model with an adapter, and its inputs."""
    kind = getattr(peft, f"{adapter.kind}Config", None)
    if kind is None:
        raise NotComparableError(f"no {adapter.kind}Config in PEFT {peft.__version__}")
    torch.manual_seed(0)
    plain, inputs = _model(model)
    try:
        adapted = peft.get_peft_model(plain, kind(**adapter.settings)).train()
    except (TypeError, ValueError) as error:
        raise NotComparableError(f"{error!r:.300}") from error
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    for module in adapted.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return adapted, inputs
