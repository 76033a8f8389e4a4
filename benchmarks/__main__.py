"""The command line: `python -m benchmarks [PART ...] [--quick] [--write]`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module

from rich.console import Console

from .measure import stamp
from .report import Report, keep, show_all, write

# In this order; `targets` reads what the others have found. For each, the function that measures it.
PARTS = {
    "compare": (
        "compare.of_steps",
        "time of a step: ours, the plain loop, torchgpipe, fairscale, torch.distributed.pipelining",
    ),
    "ranks": ("compare.of_ranks", "gpipe.distributed.Rank and torch.distributed.pipelining, each in two processes"),
    "alternatives": ("alternatives.run", "what a user would pick instead: DDP, FSDP2, torch's own pipeline"),
    "predicted": ("predictions.of_schedules", "`step` with each schedule: measured and predicted by `simulate`"),
    "plan": ("predictions.of_plans", "predictions of `gpipe.plan` compared with measurements"),
    "choice": ("choice.run", "the planner's choice compared with every alternative for small models; nothing is run"),
    "searched": ("searched.run", "a searched schedule compared with the named ones, simulated; nothing is run"),
    "memory": ("memory.run", "what a pipe keeps between forward and backward; resident memory of each library"),
    "losses": ("whole_loss.run", "a loss computed once on the full batch, compared with a call and 1F1B"),
    "models": ("own_forward.run", "a model run by its own forward, layers from a sample, and a plain loop"),
    "engine": ("engine.run", "microseconds a cell on stages that do nothing; time to import"),
    "solve": ("solve.run", "blockpartition compared with prefix sums and torchgpipe's solver"),
    "profiling": ("profiling.run", "how repeatable balances by time are"),
    "generate": ("generate.run", "tokens per second of `pipe.generate` and the plain model; how busy stages are"),
    "workers": ("micro.of_workers", "streams: workers and contexts"),
    "batches": ("micro.of_batches", "microbatch: cutting and joining"),
    "cuda": ("cuda.run", "one GPU, where there is one"),
    "targets": ("targets.run", "the targets, and the latest measurements"),
}


def main() -> None:
    options = _arguments()
    console = Console(width=200)
    line = stamp(sys.argv[1:])
    failed = []
    for part in options.parts or PARTS:
        console.rule(part)
        start = time.monotonic()
        try:
            for report in _function(part)(options):
                show_all(console, report.tables)
                if not options.quick:
                    keep(part, line, report.figures)
                for table in report.tables if options.write else ():
                    write(table, line)
        except Exception:
            console.print_exception()  # continue with the remaining parts
            failed.append(part)
        console.print(f"{part}: {time.monotonic() - start:.0f} s", highlight=False)
    console.print(line, markup=False, highlight=False)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _function(part: str) -> Callable[[argparse.Namespace], Iterable[Report]]:
    """Import and return the function that measures a part, so that unused parts are not imported."""
    module, _, name = PARTS[part][0].partition(".")
    function: Callable[[argparse.Namespace], Iterable[Report]] = getattr(import_module(f"benchmarks.{module}"), name)
    return function


def _arguments() -> argparse.Namespace:
    what = "\n".join(f"  {name:<12} {meaning}" for name, (_, meaning) in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"parts (default: all, in this order):\n{what}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--quick", action="store_true", help="check that it runs: few rounds of little work")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks/*.md")
    parser.add_argument("--rounds", type=_positive, help="instead of each part's own number")
    parser.add_argument(
        "--workload", nargs="+", metavar="NAME", help="compare, ranks: only these workloads, e.g. W, 'W 256', Llama"
    )
    parser.add_argument("--unpinned", action="store_true", help="compare: do not pin workers to cores")
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0; got {text}")
    return number


if __name__ == "__main__":
    main()
