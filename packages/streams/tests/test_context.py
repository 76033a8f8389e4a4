"""Workers and applied contexts reproduce the state in which the context was captured."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from streams import Context, DispatchMode, spawn_workers

from .fakes import PATIENCE, submit
from .strategies import COLOUR, DEVICE_TYPES, LOG, SIZE, Logging, block, cast, inside, surroundings, variable

CPU = torch.device("cpu")


def observe():
    """Return the thread-local state of torch, and its effect on a small computation."""
    return state() | {"computation": computation()}


def state():
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
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
    # A layer with its own autocast: cached casts are dropped at its end, unless an outer block still needs them.
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
    # Casts cached by one observation must not affect the next.
    torch.clear_autocast_cache()
    return result


WEIGHTS = [torch.randn(3, 3, requires_grad=True) for _ in range(2)]


def graph(tensor):
    """Return the graph of ``tensor``: each node's name, and the indices of its successors."""
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
    """Return the result of ``call`` on a worker spawned here."""
    with spawn_workers([CPU], **kwargs) as ([in_queue], _):
        return submit(in_queue, call).result(PATIENCE)


def under(context, call):
    with context.applied():
        return call()


@given(surroundings())
def test_a_worker_sees_what_its_caller_saw(blocks):
    with inside(blocks):
        assert in_worker(observe) == observe()


VARIABLES = [block(variable, COLOUR, "white"), block(variable, SIZE, 9)]
"""Variables cannot be unset, so both sides of a comparison have them."""


@given(surroundings(), surroundings())
@example([], [block(cast, "mps", torch.bfloat16, True)])
def test_context_replaces_state_and_restores_it(blocks, others):
    with inside(VARIABLES + blocks):
        context, seen = Context.capture(), observe()
    with inside(others):
        before = state()
        assert under(context, observe) == seen
        assert state() == before


@given(surroundings(), surroundings())
@example([block(torch.set_grad_enabled, False)], [])
@example([], [block(torch.set_grad_enabled, False)])
@example([], [block(cast, "cpu", torch.bfloat16, True)])
@example([], [block(variable, SIZE, 1)])
def test_context_applied_over_known_context_is_equivalent(blocks, others):
    with inside(VARIABLES):
        with inside(blocks):
            context, seen = Context.capture(), observe()
        with inside(others):
            before = state()
            with context.over(Context.capture())():
                assert observe() == seen
            assert state() == before


@given(surroundings(), surroundings())
@example([block(torch.set_grad_enabled, False), block(Logging, "x")], [block(Logging, "y")])
def test_no_mode_sees_the_change(blocks, others):
    with inside(blocks):
        context = Context.capture()
    with inside(others):
        LOG.clear()
        with context.applied():
            pass
        assert LOG == []


@given(surroundings(), surroundings())
def test_what_fails_half_way_leaves_nothing_changed(blocks, others):
    with inside(blocks):
        context = Context.capture()
    context.variables = None  # these are set when all else is
    with inside(others):
        before = state()
        with pytest.raises(AttributeError):
            under(context, lambda: pytest.fail("the block is not entered"))
        assert state() == before


class Casts(DispatchMode):
    """Counts the casts of this thread."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


class SharedCasts(RuleBasedStateMachine):
    """Threads enter and leave one context with autocast, in any order, and use one weight.

    Property: the weight is cast at its first use after a time in which no thread was inside, and at no other. A leaving
    thread removes no cast used by the remaining ones, and no cast outlives the last one.
    """

    @initialize(cache=st.booleans())
    def open(self, cache):
        self.block = spawn_workers([CPU] * 2, shared=False, context=Context.plain())
        self.in_queues, _ = self.block.__enter__()
        with torch.autocast("cpu", cache_enabled=cache):
            self.context = Context.capture()
        self.weight = torch.ones(1, 1, requires_grad=True)
        self.cache, self.inside, self.kept = cache, {}, False

    def on(self, worker, call):
        return submit(self.in_queues[worker], call).result(PATIENCE)

    @rule(worker=st.integers(0, 1))
    def enter_or_leave(self, worker):
        if worker in self.inside:
            self.on(worker, lambda: self.inside.pop(worker).__exit__(None, None, None))
        else:
            self.inside[worker] = self.context.applied()
            self.on(worker, self.inside[worker].__enter__)
        self.kept = self.kept and bool(self.inside)

    @rule(worker=st.integers(0, 1), autocast=st.booleans())
    def use(self, worker, autocast):
        def casts():
            x = torch.ones(1, 1, dtype=torch.bfloat16)
            counted = Casts()
            with counted.pushed():
                product = x @ self.weight
                if autocast:  # a layer with its own block
                    with torch.autocast("cpu", cache_enabled=self.cache):
                        x @ self.weight
            assert product.item() == self.weight.item()
            return counted.number

        if worker in self.inside:
            uses = 1 + autocast
            assert self.on(worker, casts) == (uses if not self.cache else int(not self.kept))
            self.kept = self.cache

    @rule()
    def change(self):
        if not self.inside:
            with torch.no_grad():
                self.weight += 1

    def teardown(self):
        for worker in list(self.inside):
            self.enter_or_leave(worker)
        self.block.__exit__(None, None, None)


TestSharedCasts = SharedCasts.TestCase
TestSharedCasts.settings = settings(stateful_step_count=30)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad, torch.func.functionalize])
def test_inside_a_transform_capturing_is_refused(transform):
    def work(x):
        Context.capture()
        return x.sum()

    with pytest.raises(RuntimeError, match=r"inside a torch\.func transform"):
        transform(work)(torch.ones(2))
    Context.capture()
