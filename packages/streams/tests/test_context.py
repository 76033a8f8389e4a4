import unittest.mock

import pytest
import torch
from hypothesis import example, given, settings

from streams import Context, CPUStream, Task, _context, _thread_state, spawn_workers

from .cuda import DEVICE
from .fakes import in_thread, take
from .strategies import (
    COLOUR,
    DEVICE_TYPES,
    LOG,
    SIZE,
    SWITCHES,
    TORCH_FUNCTION,
    Logging,
    block,
    cast,
    grad_mode,
    hooks,
    inside,
    surroundings,
    switch,
    torch_function,
    variable,
)

CPU = torch.device("cpu")


def observe():
    """Everything that this thread sees: the state as torch tells it, and what it does to a small computation."""
    return state() | {"computation": computation()}


def state():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "switches": {name: getattr(torch._C, f"_is_{name}_enabled")() for name in SWITCHES},
        "torch function": (torch._C._is_torch_function_enabled(), torch._C._is_torch_function_all_disabled()),
        "autocast": {kind: torch.is_autocast_enabled(kind) for kind in DEVICE_TYPES},
        "dtypes": {kind: torch.get_autocast_dtype(kind) for kind in DEVICE_TYPES},
        "cache": torch.is_autocast_cache_enabled(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "no hooks": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "default device": torch.get_default_device(),
        "modes": torch.overrides._get_current_function_mode_stack(),
        "variables": (COLOUR.get(), SIZE.get(None)),
    }


def computation():
    """Dtypes, device, graph, and the calls of hooks and modes, of two products with one weight."""
    LOG.clear()
    x, w = WEIGHTS
    first = x @ w
    # A layer with an autocast of its own: at its end kept casts go, unless an outer block still needs them.
    with torch.autocast("cpu"):
        second = x @ w
    y = first + (x @ w).exp() + second
    made = torch.empty(1)
    result = {
        "dtypes": (first.dtype, second.dtype, y.dtype),
        "made": (made.device.type, made.requires_grad, made.is_inference()),
        "graph": graph(y),
        "grads": [g is not None for g in torch.autograd.grad(y.sum(), WEIGHTS)] if y.requires_grad else None,
        "log": list(LOG),
    }
    # What one observation kept must not show in the next.
    torch.clear_autocast_cache()
    return result


WEIGHTS = [torch.randn(3, 3, requires_grad=True) for _ in range(2)]


def graph(tensor):
    """The graph behind ``tensor``: each node by name, with the numbers of those it leads to."""
    numbers, nodes = {}, []

    def visit(node):
        if node is None:
            return None
        if node not in numbers:
            numbers[node] = len(nodes)
            nodes.append(None)
            nodes[numbers[node]] = (node.name(), [visit(after) for after, _ in node.next_functions])
        return numbers[node]

    visit(tensor.grad_fn)
    return nodes


def in_worker(call, **kwargs):
    """What ``call`` gives on a worker spawned here."""
    with spawn_workers([CPU], **kwargs) as ([in_queue], [out_queue]):
        in_queue.put(Task(CPUStream, compute=call))
        ok, payload = take(out_queue)
    if not ok:
        raise payload[1]
    return payload[1]


def under(context, call):
    with context.applied():
        return call()


@given(surroundings())
def test_a_worker_sees_what_its_caller_saw(blocks):
    with inside(blocks):
        assert in_worker(observe) == observe()


@given(surroundings())
def test_a_context_applied_later_on_another_thread_shows_what_was_seen(blocks):
    with inside(blocks):
        context, seen = Context.capture(), observe()
    assert in_thread(lambda: under(context, observe)) == seen


@given(surroundings(), surroundings())
@example([], [block("cast", cast, "mps", torch.bfloat16, True)])
def test_a_context_replaces_whatever_there_was_and_gives_it_back(blocks, others):
    # Variables are not taken away, so everybody has some.
    given_variables = [block("COLOUR", variable, COLOUR, "white"), block("SIZE", variable, SIZE, 9)]
    with inside(given_variables + blocks):
        context, seen = Context.capture(), observe()
    with inside(others):
        before = state()
        assert under(context, observe) == seen
        assert state() == before


@given(surroundings())
def test_a_worker_may_be_spawned_with_another_context_than_the_callers(blocks):
    plain = in_thread(observe)
    with inside(blocks):
        assert in_worker(observe, context=Context.plain()) == plain


@given(surroundings())
def test_the_plain_context_is_that_of_a_new_thread(blocks):
    with inside(blocks):
        new = in_thread(lambda: state() | {"variables": None})
        assert under(Context.plain(), lambda: state() | {"variables": None}) == new


@given(surroundings(), surroundings())
def test_contexts_nest(outer, inner):
    with inside(outer):
        first = Context.capture()
    with inside(inner):
        second = Context.capture()
    before = state()
    with first.applied():
        between = state()
        with second.applied():
            pass
        assert state() == between
    assert state() == before


@given(surroundings(), surroundings())
@example([block("grad_mode", grad_mode, False), block("logging", Logging, "x")], [block("logging", Logging, "y")])
def test_no_mode_sees_the_change(blocks, others):
    with inside(blocks):
        context = Context.capture()
    with inside(others):
        LOG.clear()
        with context.applied():
            pass
        assert LOG == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_no_mode_sees_a_worker_begin(mode):
    LOG.clear()
    with mode(), Logging("x"):
        LOG.clear()
        assert in_worker(lambda: list(LOG)) == []


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("name", SWITCHES)
def test_the_switches_of_autograd_go_along(name, on):
    with switch(name, on):
        assert in_worker(getattr(torch._C, f"_is_{name}_enabled")) is on


class Wrapped(torch.Tensor):
    """A subclass that tells of what is done to it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        LOG.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("guard", TORCH_FUNCTION)
def test_disabled_torch_functions_stay_disabled(guard):
    def told():
        LOG.clear()
        torch.add(x, 1)
        return list(LOG)

    x = torch.ones(1).as_subclass(Wrapped)
    with torch_function(guard):
        expected = told()
        assert in_worker(told) == expected
    assert bool(expected) == (guard == "_EnableTorchFunction")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's decompositions
def test_forward_mode_ad_that_is_off_computes_no_tangents_on_a_worker_either():
    def tangent():
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(
                torch.autograd.forward_ad.make_dual(torch.ones(1), torch.ones(1)) * 2
            ).tangent

    assert in_worker(tangent) == 2
    with switch("fwd_grad", False):
        assert in_worker(tangent) is None


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_left_behind_inside_is_put_right(name):
    before = state()
    with Context.plain().applied():
        getattr(torch._C, f"_set_{name}_enabled")(not getattr(torch._C, f"_is_{name}_enabled")())
    assert state() == before


@pytest.mark.parametrize("step", ["modes", "flags", "autocast", "hooks", "variables"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@given(blocks=surroundings(), others=surroundings())
@settings(max_examples=20)
def test_what_fails_half_way_leaves_nothing_changed(step, error, blocks, others):
    def fail(wanted, **_):
        if step == "modes" and first:  # of two times
            return _thread_state.enter_modes(first.pop())
        raise error

    with inside(blocks):
        context = Context.capture()
    first = [()]
    with inside(others):
        before = state()
        with (
            unittest.mock.patch.object(_context, f"enter_{step}", fail),
            pytest.raises(error),
            context.applied(),
        ):
            pytest.fail("the block is not entered")
        assert state() == before


def test_a_grad_mode_left_behind_inside_is_put_right():
    with Context.plain().applied():
        torch._C._set_grad_enabled(False)
    assert torch.is_grad_enabled()


def test_what_is_raised_inside_passes_and_everything_is_given_back():
    with torch.inference_mode(), torch.device("meta"), hooks("a"), Logging("x"):
        context = Context.capture()
    before = state()
    with pytest.raises(ZeroDivisionError), context.applied():
        raise ZeroDivisionError
    assert state() == before


def test_the_default_device_set_for_good_goes_along():
    torch.set_default_device("meta")
    try:
        assert in_worker(lambda: torch.empty(1).device.type) == "meta"
    finally:
        torch.set_default_device(None)


def test_several_workers_may_be_under_one_context():
    with torch.no_grad(), Logging("x"), variable(COLOUR, "red"):
        seen = state()
        with spawn_workers([CPU] * 4, shared=False) as (in_queues, out_queues):
            for queue in in_queues:
                queue.put(Task(CPUStream, compute=state))
            assert [take(queue)[1][1] for queue in out_queues] == [seen] * 4


def test_a_kept_cast_does_not_outlive_the_block():
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu"):
        context = Context.capture()

    def product():
        return (torch.ones(1, 1) @ weight).item()

    assert in_thread(lambda: under(context, product)) == 1
    with torch.no_grad():
        weight.fill_(2)
    assert in_thread(lambda: under(context, product)) == 2


def test_inside_a_block_casts_are_kept_for_as_long_as_it_lasts():
    weight = torch.ones(1, 1, requires_grad=True)

    def casts():
        with context.applied():
            products = [torch.ones(1, 1) @ weight for _ in range(2)]
        return [product.grad_fn.next_functions[1][0] for product in products]

    with torch.autocast("cpu"):
        context = Context.capture()
    first, second = in_thread(casts)
    assert first is second
    with torch.autocast("cpu", cache_enabled=False):
        context = Context.capture()
    first, second = in_thread(casts)
    assert first is not second


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
def test_inside_a_transform_capturing_is_refused(transform):
    def work(x):
        Context.capture()
        return x.sum()

    with pytest.raises(RuntimeError, match=r"inside a torch\.func transform"):
        transform(work)(torch.ones(2))
    Context.capture()


def test_inside_a_transform_no_worker_is_spawned():
    with pytest.raises(RuntimeError, match=r"inside a torch\.func transform"):
        torch.vmap(lambda x: in_worker(lambda: x))(torch.ones(2))


def test_process_wide_settings_are_none_of_its_business():
    context = Context.capture()
    torch.set_default_dtype(torch.float64)
    try:
        assert under(context, torch.get_default_dtype) == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_on_cuda_goes_along(dtype):
    a = torch.ones(4, 4, device=DEVICE)
    with torch.autocast("cuda", dtype):
        assert in_worker(lambda: (a @ a).dtype) == dtype
    assert in_worker(lambda: (a @ a).dtype) == torch.float32


def test_casts_of_weights_are_kept_if_asked():
    """Otherwise the last thread that leaves autocast drops those of all."""
    weight = torch.ones(3, 3, requires_grad=True)

    def cast(**options):
        with context.applied(**options):
            return (torch.ones(1, 3) @ weight).grad_fn.next_functions[1][0]

    with torch.autocast("cpu", torch.bfloat16):
        context = Context.capture()
    kept = cast(keeps_casts=True)
    assert cast() is kept
    assert cast() is not kept
