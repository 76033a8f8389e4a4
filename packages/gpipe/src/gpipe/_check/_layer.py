"""Check that a layer computes the same on micro-batches as on the full mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from profiler.sandbox import copied

from ._findings import Finding
from ._rows import ROUNDING, Cut, Dims, NoRowsError, OtherCallsError, difference, exchange_rows, figure, select_kept
from ._trial import LayerTrial, Signal, attempt, same


@dataclass
class LayerCheck:
    """A layer, its run in the plain model, and its runs in isolation.

    Attributes:
        name: the layer's name; None for the model's own operations.
        input, result: its input in the plain model, and its run there.
        layer: the layer in its state before the forward.
        rerun_layer: the layer in a copy of the model that runs on the full mini-batch once more.
        microbatch_layer: the layer in a copy that runs on micro-batches. There, each layer runs on all micro-batches
            before the next layer starts, so a layer that reads the state of an earlier one finds its state after the
            last micro-batch.
        dims: the row dimensions of the tensors of ``input``.
        cut, parts: uneven micro-batches, and ``input`` for each of them.
        real: the micro-batches of the pipe.
        tolerance: the largest relative difference that counts as rounding.
        is_last: whether only the loss follows the layer.
        norms: the names of its modules that normalize by batch statistics.
        used_cut, used_parts: the micro-batches that the layer ran on, which are ``real`` if it does not run on ``cut``.
        copies: the layers that ran on the full mini-batch and on micro-batches.
        whole, trials: the runs of these two.
        rows: the row dimensions of the outputs.
    """

    name: str | None
    input: Signal
    result: LayerTrial
    layer: nn.Module
    rerun_layer: nn.Module
    microbatch_layer: nn.Module
    dims: Dims
    cut: Cut
    parts: Sequence[Signal]
    real: Cut
    tolerance: float
    is_last: bool
    findings: list[Finding] = field(default_factory=list)
    used_cut: Cut = field(default_factory=lambda: Cut(()))

    def examine(self) -> tuple[Dims, Sequence[Any]]:
        """Compare the layer with itself on micro-batches, and its second run on the mini-batch with the first.

        Return the row dimensions of the output, and the outputs for the micro-batches. The next layer receives
        everything in these outputs but the tensors.
        """
        self._remark()
        failing = "impure", "fails after other copies of the model have run"
        try:
            rerun = attempt(self.rerun_layer, self.input)
            failing = "hard-coded-batch", "fails on a micro-batch, but not on the full mini-batch"
            self._expect_repeated(rerun)
            if not broken(self.findings):
                self._run(rerun)
                self._compare()
        except OtherCallsError as error:
            self._find("rows", "calls different modules for a micro-batch", str(error))
        except NoRowsError as error:
            self._find("rows-lost", "its output does not follow the rows of its input", str(error))
        except Exception as error:
            self._find(*failing, f"{type(error).__name__}: {error}")
        # The next layer still gets micro-batches: one fault must not hide a second one.
        if self.used_cut != self.cut or len(self.rows) != len(self.result.tensors()) or broken(self.findings):
            return self.cut.guess_dims(self.result.tensors(), self.dims), [self.result.output.value] * len(self.parts)
        return self.rows, [trial.output.value for trial in self.trials]

    def _find(self, code: str, message: str, evidence: str = "") -> None:
        self.findings.append(Finding(code, self.name, self._kind, message, evidence))

    @property
    def _kind(self) -> str:
        layer = self.layer if self.name is not None else self.layer.get_submodule("model")
        return type(layer).__name__

    def _remark(self) -> None:
        if self.result.used.drew:
            self._find("random", "uses random numbers")
        # Norms are modules, and not part of a model's own operations.
        modules = self.layer.named_modules() if self.name is not None else ()
        self.norms = [name or type(module).__name__ for name, module in modules if normalises(module)]
        if self.norms:
            self._find("batchnorm", "normalizes each micro-batch by its own statistics", ", ".join(self.norms))

    def _expect_repeated(self, rerun: LayerTrial) -> None:
        deviation = difference(self.result.tensors(), rerun.tensors())
        # An impure layer may repeat itself by chance, for example if it reads a clock twice within its resolution.
        if self.result.used.impure:
            self._find("impure", self.result.used.impure)
        elif deviation > self.tolerance:
            message = "returns different outputs for the same input, state and seed"
            self._find("impure", message, f"differs by {figure(deviation)}")

    def _run(self, rerun: LayerTrial) -> None:
        """Run the layer on micro-batches, with dropout off and batch norms in evaluation mode."""
        self.whole, self.copies = rerun, (self.rerun_layer, self.microbatch_layer)
        # Masks and batch statistics of micro-batches differ by design. Without them, the rest can be compared.
        if self.result.used.drew or self.norms:
            self.copies = self._copy_and_calm(), calm(self.microbatch_layer, self.input, self.result.used.drew)
            self.whole = attempt(self.copies[0], self.input)
        try:
            self._run_parts(self.cut, self.parts)
        except Exception:
            # The layer may require a multiple of some number of rows. The pipe's micro-batches may satisfy it.
            self.copies = self.copies[0], self._copy_and_calm()
            self._run_parts(self.real, self.real.signals(self.input, self.dims))

    def _run_parts(self, cut: Cut, inputs: Sequence[Signal]) -> None:
        self.trials = [attempt(self.copies[1], part) for part in inputs]
        self.rows = cut.dims(self.whole.tensors(), [trial.tensors() for trial in self.trials])
        self.used_cut, self.used_parts = cut, inputs

    def _compare(self) -> None:
        """Compare outputs, then outputs with random numbers, then gradients and state. Stop at the first difference."""
        if not self.whole.used.drew:
            deviation = max([difference(*pair) for pair in self._outputs()], default=0.0)
            # Even micro-batches may hide groups of rows. Exchanging rows finds these.
            by = self._measure_mixing() if self.used_cut != self.cut else 0.0
            if max(deviation, by) > self.tolerance:
                return self._find_cause(deviation)
        found = len(self.findings)
        if self.result.used.drew:
            self._compare_in_training()
        if not self.whole.used.drew and len(self.findings) == found:
            self._compare_gradients_and_state()
        return None

    def first_differing(self) -> int | None:
        """Return the index of the first output tensor that differs on micro-batches; None if none is known."""
        pairs = enumerate(self._outputs() if self.used_cut.rows else [])
        return next((k for k, pair in pairs if difference(*pair) > self.tolerance), None)

    def _outputs(self) -> Iterator[tuple[Sequence[Tensor], Sequence[Tensor]]]:
        """Yield each output tensor but the loss, as pieces of the full output and as outputs of the micro-batches."""
        for k, (tensor, dim) in enumerate(zip(self.whole.tensors(), self.rows, strict=True)):
            if not self._is_loss(tensor):
                yield self.used_cut.pieces(tensor, dim), [trial.tensors()[k] for trial in self.trials]

    def _is_loss(self, tensor: Tensor) -> bool:
        return self.is_last and not tensor.dim()

    def _compare_in_training(self) -> None:
        """Compare runs with random numbers: with the same seed, calls must agree and rows must be independent."""
        try:
            first = attempt(copied(self.layer), self.used_parts[0])
            deviation = difference(first.tensors(), attempt(self.rerun_layer, self.used_parts[0]).tensors())
        except Exception as error:
            message = "fails on a second micro-batch in training mode"
            return self._find("stateful", message, f"{type(error).__name__}: {error}")
        if deviation > self.tolerance:
            self._find("stateful", "a second call returns a different output", f"differs by {figure(deviation)}")
        elif self._measure_mixing(masks=True) > self.tolerance:
            self._find_cause(0.0, masks=True)
        return None

    def _find_cause(self, deviation: float, *, masks: bool = False) -> None:
        """Find out why the outputs of micro-batches differ by ``deviation`` from the output of the mini-batch."""
        differs = f"micro-batches differ from the full mini-batch by {figure(deviation)} of the largest value"
        by, repeated = self._measure_mixing(masks=masks), self.whole if masks else attempt(self.copies[0], self.input)
        if difference(self.whole.tensors(), repeated.tensors()) > self.tolerance:
            self._find("stateful", "a second call returns a different output for the same input and seed", differs)
        elif by > self.tolerance:
            proof = f"changing some rows of the input changes other rows of the output, by {figure(by)}"
            self._find("mixes-rows", "an output row depends on other rows of the input", proof)
        elif deviation >= ROUNDING and None in self.rows:
            self._find("rows-lost", "reduces over rows: each micro-batch returns its own value", differs)
        elif deviation >= ROUNDING:  # smaller differences are rounding in a lower precision
            self._find("rows", "depends on the number of rows, or on the position of a row", differs)

    def _measure_mixing(self, *, masks: bool = False) -> float:
        """Return how much output rows change if different input rows change, with the same random numbers."""
        before, dims = self.whole, self.rows
        if masks:
            before = attempt(self._copy_and_calm(masks=True), self.input) if self.norms else self.result
        if len(dims) != len(before.tensors()):
            dims = self.cut.guess_dims(before.tensors(), self.dims)
        rows = sum(self.cut.rows)
        chosen = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) < 0.5
        chosen[:2] = torch.tensor([True, False])
        found = [0.0]
        # Both halves, since rows may depend only on earlier rows.
        for half in (chosen, ~chosen):
            try:
                after = attempt(self._copy_and_calm(masks=masks), exchange_rows(self.input, self.dims, half))
            except Exception:  # a layer may reject reordered rows, which does not show whether it mixes them
                continue
            if same(before.used.states, after.used.states):  # otherwise unchanged rows get different random numbers
                found.append(
                    difference(select_kept(before.tensors(), dims, half), select_kept(after.tensors(), dims, half))
                )
        return max(found)

    def _compare_gradients_and_state(self) -> None:
        """Compare gradients, parameters and buffers, once the outputs agree."""
        try:
            self._backward()
        except Exception as error:
            return self._find("gradient", "its backward fails on micro-batches", f"{type(error).__name__}: {error}")
        one, other = ([parameter.grad for parameter in layer.parameters()] for layer in self.copies)
        compared = {"its parameters": difference(one, other, alike=True), "its input": self._input_gradient_deviation()}
        tolerance = max(100 * self.tolerance, ROUNDING)
        wrong = [f"of {what}: by {figure(by)} of the largest" for what, by in compared.items() if by > tolerance]
        if wrong:
            self._find("gradient", "gradients differ, although outputs agree", "\n".join(wrong))
        old, new = ({**dict(layer.named_parameters()), **dict(layer.named_buffers())} for layer in self.copies)
        changed = [name for name in old if difference([old[name]], [new.get(name)]) > 100 * self.tolerance]
        if changed:
            self._find("buffers", "buffers end up different than after the full mini-batch", ", ".join(changed))
        return None

    def _backward(self) -> None:
        for layer in self.copies:
            layer.zero_grad()  # left by layers that share its parameters
        roots = enumerate(self.whole.roots)
        gradients = [None if self._is_loss(tensor) else _gradient(tensor, k) for k, tensor in roots]
        self.whole.backward(gradients)
        shares = [self._shares(gradient, dim) for gradient, dim in zip(gradients, self.rows, strict=True)]
        for k, trial in enumerate(self.trials):
            trial.backward([share[k] for share in shares])

    def _shares(self, gradient: Tensor | None, dim: int | None) -> Sequence[Tensor | None]:
        """Split a gradient into micro-batches. A tensor without rows gets an equal share for each of them."""
        if gradient is None or dim is None:
            return [None if gradient is None else gradient / len(self.trials)] * len(self.trials)
        return self.used_cut.pieces(gradient, dim)

    def _input_gradient_deviation(self) -> float:
        deviations = [0.0]
        for k, (leaf, dim) in enumerate(zip(self.whole.leaves, self.dims, strict=True)):
            if leaf.grad is not None and dim is not None:
                found = [trial.leaves[k].grad for trial in self.trials]
                deviations.append(difference(self.used_cut.pieces(leaf.grad, dim), found, alike=True))
        return max(deviations)

    def _copy_and_calm(self, *, masks: bool = False) -> nn.Module:
        """Return a copy of the layer whose batch norms use running statistics, and without masks unless ``masks``."""
        return calm(copied(self.layer), self.input, self.result.used.drew and not masks)


def broken(findings: Sequence[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def normalises(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def calm(layer: nn.Module, signal: Signal, drew: bool) -> nn.Module:
    """Let batch norms in ``layer`` use running statistics. If it ``drew``, put it in evaluation mode. Return it."""
    like = next((tensor for tensor in signal.tensors() if tensor.is_floating_point()), torch.zeros(()))
    for module in layer.modules():
        if isinstance(module, _BatchNorm) and normalises(module):
            if module.running_mean is None:
                module.running_mean = like.new_zeros(module.num_features)
                module.running_var = like.new_ones(module.num_features)
            module.training = False
        module.training &= not drew
    return layer


def _gradient(tensor: Tensor, k: int) -> Tensor:
    """Return a random gradient with the shape of ``tensor``, seeded with ``k``."""
    values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    return values.to(tensor.device, tensor.dtype)
