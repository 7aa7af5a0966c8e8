"""Side by side in one process: variants of the same work, interleaved, as ratios of CPU time.

Each round runs every variant once in a shuffled order; a ratio is the median, over rounds, of the time of a variant
through that of the reference in the same round, so that a slow moment of the machine hits both. One thread. glibc's
malloc gives large blocks back at once and takes them again, at a cost of 5 to 8 %, unless its thresholds are fixed.
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296", "OMP_NUM_THREADS": "1"}

Variants = dict[str, Callable[[], object]]


@dataclass
class Result:
    """One variant against the reference of its table."""

    ratio: float  # median of same-round ratios of CPU time; the reference has 1
    low: float  # their quartiles
    high: float
    milliseconds: float  # median CPU time
    peak_megabytes: float  # live bytes that torch allocated during a call, at their highest
    operations: int  # aten operations of a call, views left out
    gigaflops: float  # of matrix products and attention


def fix_environment() -> None:
    """Start this process again with one thread and fixed malloc thresholds, unless it has them."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    torch.set_num_threads(1)


class _Counter(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += not function.is_view
        return function(*args, **kwargs or {})


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that were live at once, above what was live before the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    live = highest = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def compare(variants: Variants, reference: str, *, rounds: int, seed: int = 0) -> dict[str, Result]:
    """Run every variant `rounds` times, and once more for memory, operations and FLOPs."""
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()  # what is done once is not measured
    for _ in range(rounds):
        for name in order.sample(list(variants), len(variants)):
            start = time.process_time()
            variants[name]()
            times[name].append(time.process_time() - start)
    results = {}
    for name, call in variants.items():
        ratios = [own / other for own, other in zip(times[name], times[reference], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4) if name != reference else (1.0, 1.0, 1.0)
        with _Counter() as counter:
            call()
        with FlopCounterMode(display=False) as flops:
            call()
        results[name] = Result(
            ratio=median,
            low=low,
            high=high,
            milliseconds=1000 * statistics.median(times[name]),
            peak_megabytes=peak_bytes(call) / 1e6,
            operations=counter.operations,
            gigaflops=flops.get_total_flops() / 1e9,
        )
    return results


def markdown(title: str, results: dict[str, Result], targets: dict[str, float]) -> str:
    """The table, with the target of each variant that has one and whether it is met."""
    lines = [
        f"**{title}**\n",
        "| variant | ratio | quartiles | target | ms | peak MB | operations | GFLOP |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        target = targets.get(name)
        wanted = "" if target is None else f"{target:.2f} {'met' if result.ratio <= target else 'missed'}"
        lines.append(
            f"| {name} | {result.ratio:.2f} | {result.low:.2f} to {result.high:.2f} | {wanted} | "
            f"{result.milliseconds:.1f} | {result.peak_megabytes:.1f} | {result.operations} | {result.gigaflops:.2f} |"
        )
    return "\n".join(lines) + "\n"


def as_json(results: dict[str, Result]) -> dict:
    return {name: {key: round(value, 4) for key, value in asdict(result).items()} for name, result in results.items()}
