"""Any value that a stage may send to another process arrives unchanged."""

import pickle
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from packages.microbatch.tests.strategies import Frozen, Output, Pair
from torch import Tensor

from gpipe.distributed._messages import ROOM, SMALL, RemoteLink
from gpipe.values._leaves import Activation
from gpipe.values._sharing import PRESERVED, SHARED, as_copied
from microbatch import Arguments, flatten

from .test_messages import Direct, ends

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.int64, torch.int16, torch.uint8, torch.bool),
]
CONSTANTS = st.sampled_from([None, 1, True, -0.0, float("nan"), "\ud800", torch.float8_e5m2, ..., Fraction(1, 3), Pair])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw a dense tensor of any dtype and memory layout."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    size = torch.Size(shape).numel()
    tensor = torch.arange(size, dtype=torch.float32).sub(2).reshape(shape).to(dtype)
    kinds = ["plain", "permuted", "strided", "expanded", "lazy", "offset", "parameter", "inference"]
    match draw(st.sampled_from(kinds)):
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
    floating = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_(floating and draw(st.booleans()))


def _trees(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some, two = st.lists(children, max_size=3), st.tuples(children, children)
    items = st.dictionaries(st.sampled_from(["a", 0, None]), children, max_size=3)
    return st.one_of(
        *(some, some.map(tuple), items, items.map(Output), two.map(lambda each: Pair(*each))),
        *(
            two.map(lambda each: Frozen(words=each[0], mask=each[1])),
            two.map(lambda each: Arguments(each[:1], {"x": each[1]})),
        ),
    )


def values(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw any value that a stage may send to the next stage."""
    return st.one_of(leaves, st.recursive(st.one_of(leaves, CONSTANTS), _trees, max_leaves=6))


@st.composite
def activations(draw: st.DrawFn) -> Activation:
    """Draw an activation with or without marks."""
    activation = Activation(draw(values(tensors())))
    count = len(activation.tensors)
    marks = draw(st.lists(st.sampled_from([0, PRESERVED, SHARED]), min_size=count, max_size=count))
    return Activation(activation.value, activation.tensors, marks if draw(st.booleans()) and any(marks) else ())


def assert_same_tensor(a: Tensor, b: Tensor) -> None:
    """Expect equal tensors in separate memory. Strides are equal if the elements fill the memory."""
    assert type(a) is Tensor
    assert a.is_leaf
    assert (a.dtype, a.shape, a.layout, a.requires_grad) == (b.dtype, b.shape, b.layout, b.requires_grad)
    plain = b.detach().resolve_conj().resolve_neg()
    fills = plain.clone().stride() == plain.stride()  # then a clone keeps the strides
    lazy = b.is_conj() or b.is_neg()
    assert a.stride() == (
        plain.stride() if fills and not lazy else plain.clone(memory_format=torch.contiguous_format).stride()
    )
    assert not a._is_view()
    assert torch.equal(bits(a.detach()), bits(plain))


def bits(tensor: Tensor) -> Tensor:
    """Return the data as bytes, so that NaN equals NaN."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def assert_same_value(a: Any, b: Any) -> None:
    """Expect equal trees, with equal types and constants."""
    leaves, spec = flatten(a)
    others, other = flatten(b)
    # A torch.Size becomes a tuple when it is flattened, if torch.fx has registered it.
    assert repr(spec).replace("Size,", "tuple,") == repr(other).replace("Size,", "tuple,")  # it tells 1 from True
    for leaf, its in zip(leaves, others, strict=True):
        if isinstance(its, Tensor):
            assert_same_tensor(leaf, its)
        else:
            assert (type(leaf), repr(leaf)) == (type(its), repr(its))


def assert_same_payload(found: Any, payload: Any) -> None:
    if isinstance(payload, Activation):
        assert_same_value(found.value, payload.value)
        assert list(found.marks) == list(as_copied(payload).marks)
        assert all(a is b for a, b in zip(found.tensors, Activation(found.value).tensors, strict=True))
    else:
        assert_same_value(found, payload)


LARGE = st.builds(torch.arange, st.sampled_from([SMALL // 8, SMALL // 8 + 1])).map(Activation)  # of int64
LONG = tensors().map(lambda x: Activation({"long": "." * ROOM, "x": x}))
GRADIENTS = st.lists(st.one_of(st.none(), tensors()), max_size=4)
PAYLOADS = st.one_of(activations(), GRADIENTS, LARGE, LONG)


@given(st.lists(st.tuples(PAYLOADS, st.booleans()), max_size=5), st.booleans(), st.booleans())
@example([(Activation(torch.arange(12.0).reshape(3, 2, 2)[..., 1]), True)], False, False)  # does not fill its memory
@example([(Activation(torch.arange(2.0).reshape(1, 2)[..., 1]), True)], False, False)  # one element, with a stride of 2
@example([(Activation(()), True)], False, False)
@example([(Activation(torch.tensor([1j]).conj()), True)], False, False)
@example([(Activation({"long": "." * ROOM, "x": torch.ones(2)}), True)], False, False)  # longer than a frame
def test_messages_arrive_unchanged(messages: list[tuple[Any, bool]], direct: bool, inference: bool) -> None:
    """Earlier messages and messages in flight do not matter, and nothing is left for the next run."""
    sender, receiver = ends(Direct() if direct else None)
    with torch.inference_mode() if inference else nullcontext():
        came = _exchanged(messages, sender, receiver)
    for found, payload in came:  # at the end, when later messages could have changed them
        assert_same_payload(found, payload)
    sender.poison("over")
    receiver.drain()
    assert receiver.poisoned == "over"
    sender.tell(pickle.dumps({"an": "object"}))
    assert receiver.receive() == {"an": "object"}
    sender.flush()


def _exchanged(messages: list[tuple[Any, bool]], sender: RemoteLink, receiver: RemoteLink) -> list[tuple[Any, Any]]:
    """Send each payload twice, the second time without its form, and return pairs of received and sent payloads."""
    receiver.expect(2 * len(messages))
    sent: deque[Any] = deque()
    came: list[tuple[Any, Any]] = []
    for i, (payload, is_taken) in enumerate([each for each in messages for _ in range(2)]):
        sender.put(i, payload)
        sent.append(payload)
        while sent and (is_taken or i == 2 * len(messages) - 1):
            k, _, found = receiver.get()
            assert k == len(came)
            came.append((found, sent.popleft()))
    return came


REFUSED = [
    (
        lambda: Frozen(words=[_local_class()(1)], mask=None),
        r"Frozen cannot be .* pickle.*<locals>.*top level of a module",
    ),
    (
        lambda: [torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)],
        r"a Tensor .* torch.qint8 cannot be sent",
    ),
    (lambda: torch.ones(2, device="meta"), r"a Tensor on meta"),
    (lambda: {"a": _Subclass(torch.ones(2))}, r"a _Subclass"),
    (lambda: (1, torch.ones(2).to_sparse()), r"a Tensor .* with torch.sparse_coo"),
    (lambda: {"a": [lambda: 3, 1]}, r"dict cannot be .* pickle"),
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
def test_sending_an_unsupported_value_raises(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ends()[0].put(0, Activation(value()))
