"""Messages as bytes: whatever a stage may send arrives as it was, and nothing that arrives can run code."""

from __future__ import annotations

import enum
import json
import math
import os
import shelve
import sys
from collections import OrderedDict, UserDict, defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree

from gpipe.distributed import _forms
from gpipe.distributed._forms import Form, form_of
from gpipe.values._aliases import packed, unpacked
from gpipe.values._leaves import Activation
from gpipe.values._sharing import KEPT, PARTED, SEEN, parted
from microbatch import Arguments, flatten


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Sample:
    image: Any
    label: Any = None


@dataclass
class Registered:
    x: Any
    name: str = "constant"


class Scaled(UserDict):  # type: ignore[type-arg]
    """A mapping that nobody registered."""


class Output(OrderedDict):  # type: ignore[type-arg]
    """Registered as Hugging Face's outputs are."""


class Graph:
    """Registered with a context that JSON holds only as its class says."""

    def __init__(self, nodes: Any, name: frozenset[str]) -> None:
        self.nodes, self.name = nodes, name


class Mode(enum.Enum):
    TRAIN = "train"
    EVAL = "eval"


class Level(enum.IntEnum):
    LOW = 0
    HIGH = 1


class Bits(enum.Flag):
    A = enum.auto()
    B = enum.auto()


_pytree.register_dataclass(Registered)
_pytree.register_pytree_node(Output, lambda o: (list(o.values()), list(o)), lambda v, k: Output(zip(k, v, strict=True)))
_pytree.register_pytree_node(
    Graph,
    lambda graph: ([graph.nodes], graph.name),
    lambda values, name: Graph(*values, name),
    serialized_type_name="test_forms.Graph",
    to_dumpable_context=sorted,
    from_dumpable_context=frozenset,
)

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex64, torch.complex128, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]

KEYS = st.one_of(
    *(st.text(max_size=3), st.integers(-2, 2), st.booleans(), st.none(), st.sampled_from([*Mode, *Level])),
    st.tuples(st.integers(0, 2), st.text(max_size=1)),
)

CONSTANTS = st.one_of(
    *(KEYS, st.integers(), st.floats(), st.binary(max_size=3), st.complex_numbers(), st.text()),
    st.sampled_from(
        [
            *(torch.float8_e5m2, torch.device("cuda", 1), torch.strided, torch.channels_last, torch.Size([2, 0]), ...),
            *(range(1, 9, 2), slice(None, 3), slice(torch.Size([1]), "a"), Decimal("0.10"), Fraction(1, 3)),
            *(
                Bits.A,
                Bits.A | Bits.B,
                Bits(0),
                Level.HIGH,
                Mode,
                Pair,
                int,
                type(None),
                2**70,
                -(2**63),
                math.nan,
                -0.0,
                "\ud800",
            ),
        ]
    ),
)


@st.composite
def tensors(draw: st.DrawFn, *, sparse: bool = True) -> Tensor:
    """A tensor of any dtype and layout."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    size = torch.Size(shape).numel()
    tensor = torch.arange(size, dtype=torch.float32).sub(2).reshape(shape).to(dtype)
    kinds = ["plain", "permuted", "strided", "expanded", "lazy", "offset", "parameter", "inference"]
    match draw(st.sampled_from([*kinds, *["sparse", "csr"] * sparse])):
        case "permuted":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        case "strided":
            tensor = torch.stack([tensor, tensor], -1)[..., 1] if dtype.itemsize > 1 else tensor
        case "expanded":
            tensor = tensor.unsqueeze(0).expand(2, *shape)
        case "lazy" if tensor.is_complex():
            tensor = draw(st.sampled_from([tensor.conj(), tensor.conj().imag]))
        case "offset" if tensor.dim():
            tensor = tensor[1:]
        case "inference":
            with torch.inference_mode():
                return tensor.clone()
        case "sparse" if tensor.dim() and dtype in (torch.float32, torch.int64):
            tensor = tensor.to_sparse(draw(st.integers(1, tensor.dim())))
            tensor = tensor.coalesce() if draw(st.booleans()) else torch.cat([tensor, tensor])
        case "csr" if tensor.dim() == 2 and dtype is torch.float64:
            tensor = draw(
                st.sampled_from([tensor.to_sparse_csr(), tensor.to_sparse_csc(), tensor.to_sparse_bsr((1, 1))])
            )
    floating = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(floating and draw(st.booleans()))


def _trees(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(children, max_size=3)
    two = st.tuples(children, children)
    items = st.dictionaries(KEYS, children, max_size=3)
    return st.one_of(
        *(some, some.map(tuple), some.map(deque), some.map(lambda each: deque(each, 4)), items),
        *(items.map(OrderedDict), items.map(lambda each: defaultdict(list, each)), items.map(Scaled)),
        *(items.map(lambda each: Output(each)), two.map(lambda each: Pair(*each)), two.map(lambda each: Sample(*each))),
        children.map(Registered),
        children.map(lambda each: Graph(each, frozenset("ab"))),
        st.tuples(some.map(tuple), st.dictionaries(st.text(max_size=2), children, max_size=2)).map(
            lambda each: Arguments(*each)
        ),
    )


def values(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Everything that a stage may hand to the next."""
    return st.one_of(leaves, st.recursive(st.one_of(leaves, CONSTANTS), _trees, max_leaves=6))


@st.composite
def activations(draw: st.DrawFn) -> Activation:
    """With or without ties."""
    activation = Activation(draw(values(tensors())))
    count = len(activation.tensors)
    ties = draw(st.lists(st.sampled_from([0, KEPT, SEEN, SEEN | PARTED]), min_size=count, max_size=count))
    return Activation(activation.value, activation.tensors, ties if draw(st.booleans()) and any(ties) else ())


GRADIENTS = st.lists(st.one_of(st.none(), tensors()), max_size=4)


def arrived(payload: Any) -> Any:
    """``payload`` after the way over bytes."""
    form, data = form_of(payload)
    assert [each.numel() for each in data] == list(form.sizes)
    assert all(each.dtype is torch.uint8 and each.dim() == 1 for each in data)
    again, _ = form_of(payload)
    parsed = Form.parse(form.text)
    assert again == form == parsed
    assert hash(form) == hash(parsed)
    return parsed.rebuild([each.clone() for each in data])


def assert_same_tensor(a: Tensor, b: Tensor) -> None:
    """The same in all but the memory; strides too, of what fills its memory."""
    assert type(a) is Tensor
    assert a.is_leaf
    assert (a.dtype, a.shape, a.layout, a.requires_grad) == (b.dtype, b.shape, b.layout, b.requires_grad)
    if b.layout is torch.sparse_coo:
        assert a.is_coalesced() == b.is_coalesced()
        assert_same_tensor(a.detach()._indices(), b.detach()._indices())
        assert_same_tensor(a.detach()._values(), b.detach()._values())
    elif b.layout is not torch.strided:
        assert torch.equal(a.to_dense(), b.to_dense())
    else:
        plain = b.detach().resolve_conj().resolve_neg()
        fills = plain.clone().stride() == plain.stride()  # a clone keeps the strides of what fills its memory
        assert a.stride() == (plain.stride() if fills else plain.contiguous().stride())
        assert not a._is_view()
        assert torch.equal(bits(a.detach()), bits(plain))


def bits(tensor: Tensor) -> Tensor:
    """The data, nan and all."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def assert_same_value(a: Any, b: Any) -> None:
    """The same tree, with the same types and constants."""
    leaves, spec = flatten(a)
    others, other = flatten(b)
    # Not the size of a tensor: it is a tuple after it has been flattened, if torch.fx has registered it.
    assert repr(spec).replace("Size,", "tuple,") == repr(other).replace("Size,", "tuple,")  # which tells 1 from True
    for leaf, its in zip(leaves, others, strict=True):
        if isinstance(its, Tensor):
            assert_same_tensor(leaf, its)
        else:
            assert (type(leaf), repr(leaf)) == (type(its), repr(its))


@given(activations())
def test_activations_arrive_as_they_were(activation: Activation) -> None:
    found = arrived(activation)
    assert_same_value(found.value, activation.value)
    assert list(found.ties) == list(parted(activation).ties)
    assert all(a is b for a, b in zip(found.tensors, Activation(found.value).tensors, strict=True))


@given(GRADIENTS)
def test_gradients_arrive_as_they_were(gradients: list[Tensor | None]) -> None:
    found = arrived(gradients)
    assert type(found) is list
    assert [each is None for each in found] == [each is None for each in gradients]
    for a, b in zip(found, gradients, strict=True):
        if b is not None:
            assert_same_tensor(a, b)


@given(st.lists(st.one_of(activations(), GRADIENTS), min_size=2, max_size=3))
def test_forms_are_equal_if_and_only_if_their_texts_are(payloads: list[Any]) -> None:
    forms = [form_of(payload)[0] for payload in payloads]
    for a in forms:
        for b in forms:
            assert (a == b) == (a.text == b.text)


@given(st.one_of(activations(), GRADIENTS))
def test_a_form_that_is_looked_up_is_the_one_that_would_be_written(payload: Any) -> None:
    """Also after all the other payloads of this test, which 1, True and 1.0 might be mistaken for."""
    looked_up, data = form_of(payload)
    fresh, others = _forms.written_form(payload)
    assert looked_up == fresh
    for a, b in zip(data, others, strict=True):
        assert torch.equal(a, b)


VIEWS = [
    lambda t: (t, t[:, :1]),
    lambda t: {"x": t, "again": [t, None, 3], "all": t.t()},
    lambda t: (t[:, 1:], t[:, :2], Mode.TRAIN),
    lambda t: Sample(t, t.detach()),
    lambda t: (t.detach(), t.detach().view(torch.uint8)),
    lambda t: ((packed((t, t[:1])),), t + 1, t.t()),
]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("trained", [False, True])
def test_what_shares_memory_does_so_when_it_has_arrived(view: Any, trained: bool) -> None:
    value = view(torch.arange(12.0).view(3, 4).requires_grad_(trained) * 1)
    activation = Activation(packed(value))
    found = arrived(activation)
    assert type(found.value) is type(activation.value)
    ours, theirs = (Activation(unpacked(each.value)).tensors for each in (found, activation))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        assert (a.stride(), a.dtype, a.requires_grad) == (b.stride(), b.dtype, b.requires_grad)
    with torch.no_grad():
        ours[0].zero_()
        theirs[0].zero_()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_dense_tensors_are_sent_without_a_copy_and_others_with_one() -> None:
    x = torch.randn(3, 4)
    _, (data,) = form_of(Activation(x.t()))
    assert data.data_ptr() == x.data_ptr()
    form, (data,) = form_of(Activation(x[:, :2]))
    assert form.sizes == (24,)
    assert data.untyped_storage().nbytes() == 24
    found = form.rebuild([data])
    assert found.value.data_ptr() == data.data_ptr()


def test_what_arrives_at_an_odd_address_is_copied() -> None:
    x = torch.randn(3)
    form, (data,) = form_of(Activation(x))
    buffer = torch.empty(13, dtype=torch.uint8)
    buffer[1:] = data
    assert torch.equal(form.rebuild([buffer[1:]]).value, x)


class Strange:
    """Neither a tensor nor a constant."""


REFUSED = [
    (lambda: (torch.ones(2), {"m": Strange()}), r"output\[1\]\['m'\] is of type Strange.*make it a dataclass"),
    (lambda: [{Strange: 1, Strange(): 2}], r"output\[0\] has the key .* is of type Strange"),
    (lambda: Sample([_local_class()(1)]), r"output\.image\[0\] is of class .*<locals>.*top of a module"),
    (lambda: [torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)], r"output\[0\] is a quantized tensor"),
    (lambda: torch.ones(2, device="meta"), r"output is a tensor on device meta"),
    (lambda: {"a": _Subclass(torch.ones(2))}, r"output\['a'\] is a _Subclass, a subclass of torch.Tensor"),
    (lambda: defaultdict(lambda: 3), "makes its defaults by"),
    (lambda: packed((x := torch.ones(2, 2), x[0], [Strange()])), r"output\[2\]\[0\] is of type Strange"),
]


class _Subclass(Tensor):
    pass


def _local_class() -> Any:
    @dataclass
    class Inner:
        x: Any

    return Inner


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_what_cannot_be_sent_is_refused_by_its_path(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        form_of(Activation(value()))


def test_gradients_that_cannot_be_sent_are_refused_by_their_number() -> None:
    with pytest.raises(TypeError, match="gradient 1 is a _Subclass"):
        form_of([None, _Subclass(torch.ones(2))])


class Plain:
    """No tree: making one would be seen."""

    def __init__(self, *args: Any) -> None:
        raise AssertionError("was called")


class Picky(UserDict):  # type: ignore[type-arg]
    """A mapping that cannot be made of a dict."""

    def __init__(self, one: Any, two: Any) -> None:
        super().__init__(one, two=two)


def _tree(tree: Any, tensors: Any = ()) -> str:
    return json.dumps(["activation", [*tensors], [], tree], separators=(",", ":"))


HERE = __name__
FLOATS = ["float32", [2], None, False]
FORGED = [
    *("", "{", "null", "[]", "3", '["activation"]', '["nothing",[]]', '["gradients",[3]]', "[" * 100_000),
    _tree(["namedtuple", "os:system", [["bytes", "6c73"]]]),
    _tree(["namedtuple", "subprocess:Popen", ["ls"]]),
    _tree(["dataclass", "subprocess:Popen", ["args"], ["ls"]]),
    _tree(["mapping", "subprocess:Popen", ["args"], ["ls"]]),
    _tree(["node", "subprocess:Popen", None, ["ls"]]),
    _tree(["node", f"{HERE}:Output", ["class", "subprocess:Popen"], ["ls"]]),
    _tree(["defaultdict", "subprocess:Popen", ["x"], ["ls"]]),
    _tree(["class", "os:system"]),
    _tree(["enum", "subprocess:Popen", ["x"]]),
    *[_tree([word, f"{HERE}:Plain", ["x"], [1]]) for word in ("namedtuple", "dataclass", "mapping", "node")],
    _tree(["mapping", f"{HERE}:nothing", ["x"], [1]]),
    _tree(["mapping", "not_imported:X", ["x"], [1]]),
    _tree(["namedtuple", f"{HERE}:Pair", [1]]),
    _tree(["dataclass", f"{HERE}:Sample", ["image", "other"], [1, 2]]),
    _tree(["dict", ["x"], [1, 2]]),
    _tree(["dict", ["x", "x"], [1, 2]]),
    _tree(["dict", [["dict"]], [1]]),
    _tree(["tensor"]),
    _tree([["tensor"]], [FLOATS]),
    _tree(["tensor"], [FLOATS, FLOATS]),
    _tree(["tensor"], [["float99", [2], None, False]]),
    _tree(["tensor"], [["Tensor", [2], None, False]]),
    _tree(["tensor"], [["int64", [2], None, True]]),
    _tree(["tensor"], [["float32", [-2], None, False]]),
    _tree(["tensor"], [["float32", [2.0], None, False]]),
    _tree(["tensor"], [["float32", [2], [9], False]]),
    _tree(["tensor"], [["float32", [2], [1], False]]),
    _tree(["tensor"], [["float32", [2], None, 1]]),
    _tree(["tensor"], [["sparse_coo", [2], True, False, [FLOATS]]]),
    _tree(["tensor"], [["strided", [2], True, False, [FLOATS, FLOATS]]]),
    _tree(["aliased", [[1]], ["view", 0], [["tensor"]]], [FLOATS]),
    _tree(["aliased", [[0]], ["view", 1], [["tensor"]]], [FLOATS]),
    '["activation",[],[1],null]',
    '["activation",[["float32",[2],null,false]],["x"],["tensor"]]',
    '["activation", [], [], null]',
]


@pytest.mark.parametrize("text", FORGED)
def test_forged_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="form of a message"):
        Form.parse(text)


@given(st.one_of(activations(), GRADIENTS), st.data())
def test_a_damaged_text_is_refused_or_describes_another_message(payload: Any, data: st.DataObject) -> None:
    text = form_of(payload)[0].text
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 8)))
    damaged = text[:start] + data.draw(st.text('[]",{}0123456789:nultre', max_size=4)) + text[stop:]
    with suppress(ValueError):  # and nothing else
        assert Form.parse(damaged).text == damaged


@pytest.mark.parametrize("word", ["namedtuple", "dataclass", "mapping", "node", "enum", "class", "defaultdict"])
def test_no_function_or_class_is_called_by_its_name(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(os, "system", called.append)
    monkeypatch.setattr(Plain, "__init__", lambda self, *args: called.append(args))
    for name in ("os:system", "posix:system", f"{HERE}:Plain", "builtins:eval", "subprocess:Popen"):
        for details in ([["command"], ["ls"]], [["ls"]], [None, ["ls"]]):
            with pytest.raises(ValueError, match="form of a message"):
                Form.parse(_tree([word, name, *details]))
    assert not called


def test_nothing_is_imported() -> None:
    with pytest.raises(ValueError, match="import it on every rank"):
        Form.parse(_tree(["class", "antigravity:X"]))
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "tree",
    [["mapping", f"{HERE}:Picky", ["x"], [1]], ["mapping", "shelve:Shelf", [["bytes", "78"]], [["bytes", "80"]]]],
)
def test_a_class_that_cannot_be_made_of_its_branches_is_refused(tree: Any) -> None:
    assert shelve.Shelf  # which would unpickle its items
    with pytest.raises(ValueError, match=r"cannot put a message together: .* cannot be made of its parts"):
        Form.parse(_tree(tree)).rebuild([])


def test_indices_outside_of_a_sparse_tensor_are_refused() -> None:
    form, (indices, values) = form_of([torch.eye(2).to_sparse()])
    with pytest.raises(ValueError, match="cannot put a message together"):
        form.rebuild([torch.full_like(indices, 77), values])


def test_numbers_of_numpy_arrive() -> None:
    numpy = pytest.importorskip("numpy")
    value = (numpy.float32(0.1), numpy.int64(3), numpy.complex128(1j), numpy.float64("nan"))
    found = arrived(Activation(value)).value
    assert list(map(repr, found)) == list(map(repr, value))
    assert list(map(type, found)) == list(map(type, value))


def test_the_default_device_is_not_asked() -> None:
    x = torch.ones(2, 3)
    with torch.device("meta"):
        found = arrived([x, x.to_sparse()])
    assert [each.device.type for each in found] == ["cpu", "cpu"]


def test_forms_are_not_kept_forever() -> None:
    for k in range(2 * _forms._MOST):
        form_of(Activation(("step", k)))
    assert len(_forms._forms) <= _forms._MOST


def test_data_of_another_size_are_refused() -> None:
    form, _ = form_of(Activation(torch.ones(2)))
    for data in ([], [torch.zeros(9, dtype=torch.uint8)], [torch.zeros(8)], [torch.zeros(16, dtype=torch.uint8)[::2]]):
        with pytest.raises(ValueError, match=r"uint8 tensors of \[8\] bytes; got"):
            form.rebuild(data)
