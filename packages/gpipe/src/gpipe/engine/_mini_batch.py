"""Run one mini-batch: compute outputs for the caller's graph, train, or evaluate.

The caller holds the pipe's run lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from threading import current_thread

from torch import Tensor, nn

from microbatch import Batch, Versions
from streams import add_note

from ..values._leaves import Activation, detach_leaves
from ..values._sharing import PRESERVED, clone_preserved, flag_aliases
from ._autograd import attach
from ._autograd_calls import accumulate_whole
from ._pipeline import Pipeline
from ._processes import may_be_data_parallel, refuse_data_parallel
from ._run import Run
from ._scale import Scale, scale_gradient
from ._spec import RunSpec


def compute_outputs(
    pipeline: Pipeline, spec: RunSpec, batches: Sequence[Batch], versions: Versions
) -> list[Activation]:
    """Compute the outputs of all micro-batches, connected to the caller's graph.

    Raises the earliest error in the schedule, with a note on its location.

    Args:
        versions: syncs in-place changes between the micro-batches and the tensors they were split from.
    """
    if spec.trains:
        pipeline.trainers.add(current_thread())
    run = Run(pipeline, spec)
    with pipeline.processes.together(run.state), pipeline.processes.interruptible():
        outputs = run.forward(_entering(pipeline, batches))
    # Layers may have modified micro-batches in place, which share memory with the caller's tensors.
    versions.sync()
    # The caller may modify the outputs of a single micro-batch, although a recomputation may need the originals.
    if len(outputs) == 1:  # several outputs are copied when they are concatenated
        outputs = [clone_preserved(outputs[0])]
    return _attach_outputs(pipeline, run, versions, batches, outputs) if spec.trains else outputs


def train(pipeline: Pipeline, spec: RunSpec, batches: Sequence[Batch]) -> None:
    """Compute forwards, losses and backwards of all micro-batches; add gradients to ``.grad``.

    After an error, each ``.grad`` that was None is None again. Other parameters may have accumulated the gradients of
    some micro-batches, and a note on the error says so.
    """
    pipeline.trainers.add(current_thread())
    run = Run(pipeline, spec)
    pipeline.run_lock.claim(run.parameters)
    # After a failure, a .grad that was None must not hold partial gradients.
    empty = [parameter for parameter in run.parameters if parameter.grad is None]
    adds = False
    try:
        with pipeline.processes.together(run.state), pipeline.processes.interruptible():
            refuse_data_parallel(run.kept_nodes)
            gradients = run.train(_entering(pipeline, batches))
        whole = pipeline.processes.sum_gradients(run.whole())
        # From here on, gradients may be added to existing ones, even if a hook fails.
        adds = True
        scale = 1.0 if spec.loss is None else spec.loss.scale
        # One backward, since a leaf may be used both before the pipe and in the loss, and hooks may wait for several
        # gradients.
        accumulate_whole([*_flowing(batches[: len(gradients)], gradients, scale), *whole.items()])
        if spec.updates is not None:
            spec.updates.end()
    except BaseException as error:
        if spec.updates is not None:
            spec.updates.stop()
        try:
            run.deferred.give_back(failed=True)
        finally:
            run.deferred.give_back(failed=True)  # the rest, after a second interrupt
            _restore(run, empty, error, adds or run.adds)
        if spec.updates is not None:
            spec.updates.give_back(error)
        raise


def evaluate(pipeline: Pipeline, spec: RunSpec, batches: Sequence[Batch]) -> None:
    """Compute forwards and losses of all micro-batches."""
    run = Run(pipeline, spec)
    with pipeline.processes.together(run.state), pipeline.processes.interruptible():
        run.evaluate(_entering(pipeline, batches))


def _attach_outputs(
    pipeline: Pipeline, run: Run, versions: Versions, inputs: Sequence[Batch], outputs: Sequence[Activation]
) -> list[Activation]:
    """Return ``outputs`` attached to the caller's graph by a node that runs the backward of ``run``."""
    counts = [len(output.tensors) for output in outputs]

    def backward(seeds: Sequence[Tensor | None]) -> list[Tensor | None]:
        # The caller may have modified its tensors since the forward. Autograd then rejects its saved tensors.
        versions.sync()
        flowing = iter(seeds)
        return pipeline.run_lock.run(lambda: run_backward([[*islice(flowing, count)] for count in counts]))

    def run_backward(seeds: Sequence[list[Tensor | None]]) -> list[Tensor | None]:
        pipeline.run_lock.claim(run.parameters)
        if left and sum(thread.is_alive() for thread in pipeline.trainers) > 1:
            raise RuntimeError(_SEVERAL_THREADS)
        try:
            found, own = run.backward(seeds, left)
        except BaseException:
            # An interrupt may arrive after the workers have finished, and a second one in this.
            try:
                run.deferred.give_back(failed=True)
            finally:
                run.deferred.give_back(failed=True)
            raise
        return [*chain.from_iterable(found), *own]

    # DistributedDataParallel has hooks on the nodes of these parameters, which must receive one gradient that includes
    # other parts of the caller's graph. But autograd adds it after the run lock is released, when a different thread
    # that trains the pipe may be accumulating outside .grad.
    left = run.kept_nodes if run.kept_nodes and may_be_data_parallel() else []
    tensors = [tensor for output in outputs for tensor in output.tensors]
    attached = iter(attach(backward, [*chain.from_iterable(inputs), *left], tensors))
    return [output.with_tensors(islice(attached, len(output.tensors))) for output in outputs]


_SEVERAL_THREADS = (
    "several threads train this pipe, and hooks of its parameters, such as those of DistributedDataParallel, wait for "
    "gradients that the caller's backward adds; train it in one thread, or by step()"
)


def _restore(run: Run, empty: Sequence[nn.Parameter], error: BaseException, adds: bool) -> None:
    """Reset ``.grad`` of ``empty`` to None after a failure; note whether ``run`` added to existing gradients."""
    for parameter in empty:
        parameter.grad = None
    others = len({*run.parameters}) - len({*empty})  # stages may share parameters
    if others and adds:
        add_note(
            error,
            f"the .grad of {others} parameters held gradients before this step, and now may also hold those of some of "
            "its micro-batches; call zero_grad() before the next step",
        )


def _entering(pipeline: Pipeline, batches: Sequence[Batch]) -> list[Activation]:
    """Return the micro-batches as leaves; none if this process does not need them."""
    return [*map(_leaves, batches)] if pipeline.takes_inputs else []


def _leaves(batch: Batch) -> Activation:
    if isinstance(batch.value, Tensor):
        return Activation(batch.value.detach().requires_grad_(batch.value.requires_grad), marks=(PRESERVED,))
    leaves = detach_leaves(Activation(batch.value))
    return flag_aliases(leaves, leaves, [(tensor, PRESERVED) for tensor in leaves.tensors])


def _flowing(
    batches: Sequence[Batch], gradients: Sequence[list[Tensor | None]], scale: Scale
) -> list[tuple[Tensor, Tensor]]:
    pairs = (zip(batch, each, strict=True) for batch, each in zip(batches, gradients, strict=True))
    return [
        (tensor, scale_gradient(gradient, scale))
        for tensor, gradient in chain.from_iterable(pairs)
        if gradient is not None and tensor.requires_grad  # a layer may have called requires_grad_() on its own leaf
    ]
