"""Realistic models: several lists, residuals, values read from tensors, and values used by later stages."""

import copy
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpipe import GPipe
from microbatch import Split

from ..layers import Layer, gradients
from .trunks import ROWS, WIDTH, Mix, Model, batch, models, pair


def loss_of(output: dict[str, Tensor]) -> Tensor:
    return output["logits"].square().mean()


@settings(max_examples=settings.default.max_examples // 2)
@given(models(), st.sampled_from(["1f1b", "fill_drain", "zero_bubble"]), st.data())
def test_it_trains_as_the_model_does(
    problem: tuple[dict[str, Any], dict[str, Any]], schedule: str, data: st.DataObject
):
    """The model may be on meta."""
    options, kinds = problem
    (model, plain), init = pair(**options), None
    if data.draw(st.booleans()):
        with torch.device("meta"):
            model, init = Model(**options).double(), plain.state_dict()
    mode = data.draw(st.sampled_from(["always", "except_last", "never"]))
    inputs, devices = batch(**kinds), ["cpu"] * data.draw(st.integers(1, 3))
    with closing(GPipe(model, devices=devices, chunks=3, checkpoint=mode, init=init)) as pipe:
        torch.testing.assert_close(pipe(**inputs)["logits"], plain(**inputs)["logits"])
        pipe.step(
            **inputs, loss_fn=lambda output: output["logits"].square().mean(), reduction="mean", schedule=schedule
        )
    plain(**inputs)["logits"].square().mean().backward()
    torch.testing.assert_close(gradients(model), gradients(plain))
    torch.testing.assert_close(model(**inputs)["logits"], plain(**inputs)["logits"])


def test_arguments_may_be_none_in_some_batches():
    model, plain = pair()
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=2)
    inputs = batch(mask=False)
    for each in (batch(), inputs, {**inputs, "mask": None}, batch()):
        torch.testing.assert_close(pipe(**each)["logits"], plain(**each)["logits"])
    torch.testing.assert_close(pipe(batch()["x"], batch()["mask"])["logits"], plain(**batch())["logits"])


def stages() -> nn.Module:
    """Return a model like a convolutional network: several sequential lists, called as a whole."""

    def row(count: int) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))

    ends = {"stem": nn.Linear(2, WIDTH), "head": nn.Linear(WIDTH, 1)}
    return Layer(lambda s, x: s.head(s.layer2(s.layer1(s.stem(x).relu()))), **ends, layer1=row(2), layer2=row(3))


def nested(alike: bool = True) -> nn.Module:
    """Lists in a list, which is not called itself, of layers of one kind or of two."""

    def forward(s: Layer, x: Tensor) -> Tensor:
        hidden = s.stem(x)
        for group in s.groups:
            for layer in group:
                hidden = layer(hidden)
            hidden = hidden.relu()
        return hidden

    def layer() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    pairs = [[layer(), layer() if alike else nn.Sequential(layer())] for _ in range(2)]
    groups = nn.ModuleList(map(nn.ModuleList, pairs))
    return Layer(forward, stem=nn.Linear(2, WIDTH), groups=groups)


def tower() -> nn.Module:
    """Stages that are modules around blocks, each with a projection before them; blocks reuse an activation."""

    def stage() -> nn.Module:
        act = nn.ReLU(inplace=True)
        blocks = [nn.Sequential(act, nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        return Layer(lambda s, x: s.blocks(s.before(x)), before=nn.Linear(WIDTH, WIDTH), blocks=nn.Sequential(*blocks))

    parts = nn.Sequential(stage(), stage())
    return Layer(lambda s, x: s.stages(s.stem(x)).tanh(), stem=nn.Linear(2, WIDTH), stages=parts)


@pytest.mark.parametrize("make", [tower, stages, nested, partial(nested, False)])
@pytest.mark.parametrize("devices", [2, 3])
def test_several_lists_train_as_in_the_model(make: Callable[[], nn.Module], devices: int):
    torch.manual_seed(0)
    model = make()
    plain, x = copy.deepcopy(model), torch.randn(ROWS, 2)
    pipe = GPipe(model, devices=["cpu"] * devices, chunks=2)
    pipe(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(gradients(model), gradients(plain))


class Told(Model):
    """A model with the given ``forward``."""

    def __init__(self, told: Callable[..., Any], others: int = 0) -> None:
        super().__init__(others=others)
        self.told = told

    def forward(self, x: Tensor) -> Tensor:
        return self.told(self, x)

    def through(self, hidden: Tensor, blocks: Iterable[nn.Module] | None = None, **options: Any) -> Tensor:
        for block in self.body.blocks if blocks is None else blocks:
            hidden = block(hidden, None, **options)[0]
        return hidden

    def past(self, hidden: Tensor) -> Tensor:
        for other in self.others:
            hidden = other(hidden)
        return hidden


def _long_skip(model: Told, x: Tensor) -> Tensor:
    first = model.embed(x)
    return model.head(model.through(first) + first)


def _by_forward(model: Told, x: Tensor) -> Tensor:
    return model.head.forward(model.through(model.embed(x), [block.forward for block in model.body.blocks]))


def _asked(model: Told, x: Tensor) -> Tensor:
    """Create tensors from the parameters of a submodule, which all belong to other layers."""
    hidden = model.embed(x.to(next(model.body.parameters()).dtype))
    hidden = model.past(model.through(hidden))
    return model.head(hidden * torch.ones((), dtype=next(model.body.parameters()).dtype))


def _stepwise(model: Told, x: Tensor) -> Tensor:
    """Use a parameter and a module after every block, with arguments that depend on the block's class."""
    hidden = model.embed(x)
    for block in model.body.blocks:
        given = (hidden, None) if isinstance(block, Mix) else (hidden, hidden)
        hidden = model.middle(hidden + model.factor * block(*given)[0])
    return model.head(model.past(hidden))


def _in_place(model: Told, x: Tensor) -> Tensor:
    """Modify a module's output before the blocks, and use it after them; not in evaluation."""
    first = model.embed(x)
    aside = model.middle(first)
    aside *= model.factor
    hidden = model.past(model.through(first))
    return model.head(hidden + aside if model.training else hidden)


def _like(model: Told, x: Tensor) -> Tensor:
    """Convert a mask to the dtype of the previous block's output, which is not used otherwise."""
    hidden, mask = model.embed(x), (x > 0).any(1, keepdim=True)
    for k, block in enumerate(model.body.blocks):
        hidden = block(hidden, mask.to(hidden) if k % 2 else mask.type_as(hidden))[0]
    return model.head(hidden)


WAYS = [_long_skip, _asked, _stepwise, _in_place, _like]


@pytest.mark.parametrize("told", WAYS)
@pytest.mark.parametrize("others", [0, 2])
def test_values_for_later_stages_skip_those_between(told: Callable[..., Any], others: int):
    torch.manual_seed(1)
    model = Told(told, others=others).double()
    plain = copy.deepcopy(model)
    x = batch()["x"]
    for devices, mode in product((2, 4), ("always", "never")):
        for each in (model, plain):
            each.zero_grad()
        pipe = GPipe(model, devices=["cpu"] * devices, chunks=3, checkpoint=mode)
        pipe.step(x, loss_fn=lambda output, _: output.square().mean(), reduction="mean", schedule="1f1b")
        plain(x).square().mean().backward()
        torch.testing.assert_close(gradients(model), gradients(plain))
        pipe.close()


def checkpointed(function: Callable[[nn.Module, Tensor], Tensor]) -> Callable[..., Any]:
    def told(model: Told, x: Tensor) -> Tensor:
        hidden = model.embed(x)
        for block in model.body.blocks:
            hidden = checkpoint(partial(function, block), hidden, use_reentrant=False)
        return model.head(hidden)

    return told


@pytest.mark.parametrize("reduction", ["mean", None])
@pytest.mark.parametrize("mode", ["always", "never"])
def test_model_checkpointing_works_per_block_or_raises(mode: str, reduction: str | None) -> None:
    x, given = batch()["x"], {"loss_fn": lambda output: output.square().mean(), "reduction": reduction}
    model = Told(checkpointed(lambda block, y: block(y, None)[0])).double()
    plain = copy.deepcopy(model)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2, checkpoint=mode)) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            pipe.step(x, **given)
    plain(x).square().mean().backward()
    torch.testing.assert_close(gradients(model), gradients(plain))
    model.told = checkpointed(lambda block, y: y + block(y, None)[0].tanh())
    with (
        closing(GPipe(model, devices=["cpu"] * 2, chunks=2, checkpoint=mode)) as pipe,
        pytest.raises(RuntimeError, match=r"leave checkpointing to GPipe\(checkpoint=\.\.\.\)"),
    ):
        pipe.step(x, **given)


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])  # see engine/test_saved.py for "offload"
@pytest.mark.parametrize("how", ["save_on_cpu", "own hooks"])
def test_saved_tensor_hooks_of_model_work(how: str, mode: str) -> None:
    graph = torch.autograd.graph
    hooks = {"save_on_cpu": graph.save_on_cpu, "own hooks": lambda: graph.saved_tensors_hooks(torch.clone, torch.clone)}

    def forward(model: Told, x: Tensor) -> Tensor:
        y = model.embed(x)
        with hooks[how]():
            for block in model.body.blocks:
                y = y + block(y, None)[0].tanh()
        return model.head(y)

    model, x = Told(forward).double(), batch()["x"]
    plain = copy.deepcopy(model)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2, checkpoint=mode)) as pipe:
        pipe(x).square().mean().backward()
    plain(x).square().mean().backward()
    torch.testing.assert_close(gradients(model), gradients(plain))


def test_later_hook_applies_to_all_stages():
    model = Told(_long_skip).double()
    x = batch()["x"]
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        before = pipe(x)
        model.embed.register_forward_hook(lambda module, args, output: output * 3)
        assert not torch.allclose(pipe(x), before)
        torch.testing.assert_close(pipe(x), model(x))


@dataclass
class Packed:
    hidden: Tensor
    first: Tensor | None = None


class Packs(nn.Linear):
    def forward(self, x: Tensor) -> Packed:
        return Packed(x + super().forward(x).tanh())


class Realistic(nn.Module):
    """Has dataclasses, a parameter list, a computed weight, a batch as its argument, and sets an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.utils.parametrizations.weight_norm(nn.Linear(2, WIDTH))
        self.blocks = nn.ModuleList(Packs(WIDTH, WIDTH) for _ in range(3))
        self.scales = nn.ParameterList(torch.rand(WIDTH) for _ in range(3))
        self.aside = 0.0

    def forward(self, batch: dict[str, Tensor]) -> Packed:
        first = hidden = self.embed(batch["x"])
        self.aside = first.square().mean()
        for block, scale in zip(self.blocks, self.scales, strict=True):
            hidden = block(hidden).hidden * scale
        return Packed(hidden, first)


def test_a_forward_with_much_that_real_ones_have() -> None:
    model, given = Realistic(), {"x": torch.randn(4, 2)}
    plain = copy.deepcopy(model)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        found, expected = pipe(given), plain(given)
        torch.testing.assert_close((found.hidden, found.first), (expected.hidden, expected.first))
        (found.hidden + found.first).square().sum().backward()
        (expected.hidden + expected.first).square().sum().backward()
        torch.testing.assert_close(gradients(model), gradients(plain))
        torch.testing.assert_close(pipe.aside.detach(), plain.aside.detach())


def net() -> nn.Module:
    """Modules without a list."""
    parts = {"first": nn.Linear(2, WIDTH), "second": nn.Linear(WIDTH, 3), "act": nn.Tanh()}
    return Layer(lambda s, x: s.second(s.act(s.first(x)).relu()), **parts)


def scaled(s: Layer, x: Tensor) -> Tensor:
    """A module has most of the parameters; with a loss."""
    return s.loss(s.net(x) * s.scale, x.new_ones(len(x), 3))


def test_called_modules_become_blocks_without_lists():
    model, x = Layer(scaled, net=net(), scale=nn.Parameter(torch.ones(3)), loss=nn.MSELoss()), torch.randn(4, 2)
    pipe = GPipe(model, devices=["cpu"] * 2, chunks=2)
    assert pipe.block_names == ["net.first", "net.second"]
    torch.testing.assert_close(pipe(x), model(x))


class Cache:
    """No constant, and no tree of tensors: one, as a factor."""

    def __rmul__(self, other: Tensor) -> Tensor:
        return other


def _cached(model: Told, x: Tensor) -> Tensor:
    return model.head(model.through(model.embed(x), scale=Cache()))


def _part_of_a_block(model: Told, x: Tensor) -> Tensor:
    return model.head(model.body.blocks[0].linear(model.through(model.embed(x))))


def _over_the_input(model: Told, x: Tensor) -> Tensor:
    x *= 1
    return model.head(model.through(model.embed(x)))


@pytest.mark.parametrize(
    "told", [_cached, _part_of_a_block, _by_forward, _over_the_input], ids=lambda told: told.__name__
)
@pytest.mark.parametrize("reduction", ["mean", None])
def test_what_needs_no_layers(told: Callable[..., Any], reduction: str | None):
    """Objects as arguments, a part of a block, blocks that are called by their forward, and a changed input."""
    model = Told(told).double()
    plain, x = copy.deepcopy(model), batch()["x"]
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        pipe.step(x.clone(), loss_fn=lambda output: output.square().mean(), reduction=reduction)
    plain(x.clone()).square().mean().backward()
    torch.testing.assert_close(gradients(model), gradients(plain))


class Padded(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, **options)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_encoder_requires_disabling_nested_tensors() -> None:
    x, padding = torch.randn(4, 5, 4), torch.arange(5) >= torch.tensor([[5], [3], [4], [2]])
    model = Padded(enable_nested_tensor=False)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        torch.testing.assert_close(pipe(x=x, padding=padding), model(x, padding))


READS: dict[str, Callable[[Tensor], Any]] = {
    "if": lambda hidden: hidden.sum() > 0,
    "item": lambda hidden: hidden.sum().item() > 0,
    "tolist": lambda hidden: sum(map(sum, hidden.tolist())) > 0,
    "numpy": lambda hidden: hidden.detach().numpy().sum() > 0,
    "array": lambda hidden: np.asarray(hidden.detach()).sum() > 0,
}


def _reads_an_output(read: Callable[[Tensor], Any], model: Told, x: Tensor) -> Tensor:
    hidden = model.embed(x)
    sign = 1 if read(hidden) else -1
    return model.head(model.past(model.through(hidden)) * sign)


def _reads_a_buffer(model: Told, x: Tensor) -> Tensor:
    level = model.level.item()
    return model.head(model.past(model.through(model.embed(x))) * (level + 1))


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.sampled_from([_reads_a_buffer, *(partial(_reads_an_output, read) for read in READS.values())]),
    st.sampled_from([0, 2]),
    st.integers(0, 9),
)
def test_numbers_read_by_forward_are_per_micro_batch(told: Callable[..., Any], others: int, seed: int):
    torch.manual_seed(seed)
    model = Told(told, others=others)
    model.register_buffer("level", torch.tensor(0))
    x = torch.randn(6, 2)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=3, out_spec=Split(0))) as pipe:
        for level in (seed, 0):
            model.level.fill_(level)
            torch.testing.assert_close(pipe(x), torch.cat([model(part) for part in x.chunk(3)]))


def _passing(s: Layer, hidden: Tensor, value: Any) -> tuple[Tensor, Any]:
    return s.m[0](hidden), hidden.mean(1, keepdim=True) if value == "a tensor" else value


def _uses_what_blocks_return(model: Told, x: Tensor) -> Tensor:
    hidden = model.embed(x)
    for block in model.body.blocks:
        hidden, found = block(hidden, model.value)
    return model.head(hidden * (0.5 if found is None else found))


values = st.sampled_from([None, 1, 2, "a tensor"])


@given(values, values)
def test_numbers_returned_by_blocks_are_per_batch(then: Any, now: Any):
    model = Told(_uses_what_blocks_return)
    model.body.blocks = nn.ModuleList(Layer(_passing, nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    x = torch.randn(4, 2)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        for model.value in (then, now, then):
            torch.testing.assert_close(pipe(x), model(x))


@pytest.mark.parametrize("uses", [lambda hidden: hidden * 2, lambda hidden: hidden if len(hidden) else None])
@pytest.mark.parametrize("reduction", ["mean", None])
def test_what_is_computed_between_blocks_may_change(uses: Callable[[Tensor], Any], reduction: str | None):
    def scales(model: Model, x: Tensor) -> Tensor:
        hidden = model.embed(x)
        for block in model.body.blocks:
            hidden = block(hidden, None)[0]
            if model.scale != 1:
                hidden = uses(hidden)
        return model.head(hidden)

    model = Told(scales)
    x, loss_fn = torch.randn(4, 2), lambda output: output.square().mean()
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        for model.scale in (1.0, 2.0, 1.0):
            found = pipe.evaluate(x, loss_fn=loss_fn, reduction=reduction)
            torch.testing.assert_close(found, loss_fn(model(x)).detach())
            torch.testing.assert_close(pipe(x), model(x))


SIZES: dict[str, Callable[[Tensor], int]] = {
    "shape": lambda image: image.shape[-1],
    "size": lambda image: image.size(2),
    "stride": lambda image: image.stride()[2],
    "numel": lambda image: image.numel() // len(image),
    "len": lambda image: len(image[0, 0].T),
}


class Halves(nn.Module):
    """Blocks halve an image, and the forward computes with its size."""

    def __init__(self, asked: list[str], *, as_argument: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(2, 2, 3, stride=2, padding=1) for _ in asked)
        self.ups = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in asked)
        self.asked, self.as_argument = asked, as_argument

    def forward(self, image: Tensor, labels: Tensor | None = None) -> Any:
        sizes, product = [], 1.0
        for block, name in zip(self.blocks, self.asked, strict=True):
            sizes.append(image.shape[2:])
            image = block(image)
            product *= 1 + SIZES[name](image) / 100
        for up in self.ups:
            image = up(F.interpolate(image, size=sizes.pop()) if self.as_argument else image)
        found = image.mean((2, 3)) * product
        return found if labels is None else {"loss": F.cross_entropy(found, labels), "logits": found}


@given(
    st.lists(st.sampled_from(sorted(SIZES)), min_size=2, max_size=3),
    st.booleans(),
    st.lists(st.sampled_from([16, 24, 32, 40]), min_size=2, max_size=3),
)
def test_sizes_read_by_forward_are_per_batch(asked: list[str], as_argument: bool, widths: list[int]):
    model = Halves(asked, as_argument=as_argument)
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        for width in widths:
            image = torch.randn(4, 2, width, width)
            torch.testing.assert_close(pipe(image), model(image))


def test_full_batch_loss_has_sizes_of_batch():
    model = Halves(["shape", "size"], as_argument=False)

    def batch(rows: int, width: int) -> dict[str, Tensor]:
        return {"image": torch.randn(rows, 2, width, width), "labels": torch.randint(2, (rows,))}

    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        for width in (16, 32):
            whole = batch(4, width)
            expected = model(**whole)["loss"]
            torch.testing.assert_close(pipe.step(**whole), expected.detach())
            torch.testing.assert_close(pipe(**whole)["loss"], expected)
