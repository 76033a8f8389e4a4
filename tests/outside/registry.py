"""Small models that are hard to split, similar to PyTorch's own tests of pipelines."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpipe import Arguments

from ..own_forward import Case, of_all_rows

ROWS, WIDTH = 6, 8


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).relu())
        return out


class Named(nn.Module):
    """No list: each block is a separate attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.block0, self.block1, self.block2 = Perceptron(), Perceptron(), Perceptron()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block2(self.block1(self.block0(x)))
        return out


class Listed(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Perceptron() for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sequential(nn.Module):
    """Its forward calls a container of the blocks, and not them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Sequential(*(Perceptron() for _ in range(4))), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.net(x).relu())
        return out


class Parameters(Listed):
    """Parameters and a buffer that the forward uses itself, and a second input with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.exit = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("constant", torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = x @ self.entry
        x = torch.relu(x if y is None else x + y)
        constant = self.constant.clone()
        x = self.blocks[1](self.blocks[0](x))
        return torch.relu(self.blocks[3](self.blocks[2](x + constant) @ self.exit))


class Alias(Parameters):
    """A parameter and a block, each under two names and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.exit = self.entry
        self.blocks[3] = self.blocks[0]


class Keywords(Listed):
    """Blocks that take keywords, some without gradient."""

    def forward(self, x: Tensor, *, by: Tensor, shift: int = 1) -> Tensor:
        for block in self.blocks:
            x = block(x=x * by) + shift
        return x


class Skips(Listed):
    """The output of each block is used again, in reverse order."""

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks:
            kept.append(x)
            x = block(x)
        while kept:
            x = x + kept.pop()
        return x


class Outputs(Listed):
    """The output is a tuple with one part that has no gradient, and one with a gradient of zero."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return x, x.argmax(1), {"middle": states[1] * 1, "none": states[0].detach()}


class Frozen(Listed):
    """The first block and the third one are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class InPlace(Listed):
    """Views are changed in place between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        for block in self.blocks:
            x = block(x)
            x[:, :2].mul_(2)
            x += 1
        return x


class Recurrent(nn.Module):
    """A cell called once per step of a sequence, between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleList([Perceptron() for _ in range(2)])
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.after = nn.ModuleList([Perceptron() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for block in self.before:
            x = block(x)
        for _ in range(3):
            state = self.cell(x, state)
        for block in self.after:
            state = block(state)
        return state


class Encoded(nn.Module):
    """PyTorch's own encoder and decoder, which call their layers with keywords and masks."""

    def __init__(self) -> None:
        super().__init__()
        settings = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 2 * WIDTH, "dropout": 0.0, "batch_first": True}
        self.model = nn.Transformer(num_encoder_layers=2, num_decoder_layers=2, **settings)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        out: Tensor = self.head(self.model(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True))
        return out


def values(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(len(shape)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Arguments]] = {
    "named": (Named, Arguments((values(WIDTH),), {})),
    "listed": (Listed, Arguments((values(WIDTH),), {})),
    "sequential": (Sequential, Arguments((values(WIDTH),), {})),
    "parameters": (Parameters, Arguments((values(WIDTH),), {})),
    "a second input": (Parameters, Arguments((values(WIDTH), values(WIDTH)), {})),
    "a second input by name": (Parameters, Arguments((values(WIDTH),), {"y": values(WIDTH)})),
    "alias": (Alias, Arguments((values(WIDTH),), {})),
    "keywords": (Keywords, Arguments((values(WIDTH),), {"by": values(1), "shift": 2})),
    "skips": (Skips, Arguments((values(WIDTH),), {})),
    "outputs": (Outputs, Arguments((values(WIDTH),), {})),
    "frozen": (Frozen, Arguments((values(WIDTH),), {})),
    "in place": (InPlace, Arguments((values(WIDTH),), {})),
    "recurrent": (Recurrent, Arguments((values(WIDTH),), {})),
    "encoded": (Encoded, Arguments((values(5, WIDTH),), {})),
}


def case(name: str) -> Case:
    make, batch = MODELS[name]
    torch.manual_seed(0)
    return Case(make().train(), batch, of_all_rows)
