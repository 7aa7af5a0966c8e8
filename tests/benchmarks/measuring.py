"""Side by side in one process: variants of the same work, interleaved, as ratios of time.

Each round runs every variant once in a shuffled order; a ratio is the median, over rounds, of the time of a variant
through that of the reference in the same round, so that a slow moment of the machine hits both.

On a CPU the time is the process's own, with one thread; glibc's malloc gives large blocks back at once and takes them
again, at a cost of 5 to 8 %, unless its thresholds are fixed. On a GPU it is the clock's, until the device is done.
"""

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
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

    ratio: float  # median of same-round ratios of time; the reference has 1
    low: float  # their quartiles
    high: float
    milliseconds: float  # median time
    memory: float  # peak_megabytes through the reference's
    peak_megabytes: float  # live bytes that torch allocated during a call, at their highest
    operations: int  # aten operations of a call, views left out
    gigaflops: float  # of matrix products and attention


def fix_environment(more: Mapping[str, str]) -> None:
    """Start this process again with one thread, fixed malloc thresholds, and `more` variables, unless it has them."""
    wanted = {**ENVIRONMENT, **more}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    torch.set_num_threads(1)


class Operations(TorchDispatchMode):
    """Counts aten operations, views left out."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view
        return function(*args, **kwargs or {})


def peak_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """The most bytes that were live at once, above what was live before the call."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    live = highest = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def seconds(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    start = time.process_time()
    call()
    return time.process_time() - start


def compare(
    variants: Variants, reference: str, *, rounds: int, device: str = "cpu", seed: int = 0
) -> dict[str, Result]:
    """Run every variant `rounds` times, and once more each for memory, operations and FLOPs."""
    order = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()  # what is done once is not measured
    for _ in range(rounds):
        for name in order.sample(list(variants), len(variants)):
            times[name].append(seconds(variants[name], device))
    peaks = {name: peak_bytes(call, device) for name, call in variants.items()}
    results = {}
    for name, call in variants.items():
        ratios = [own / other for own, other in zip(times[name], times[reference], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4) if name != reference else (1.0, 1.0, 1.0)
        with Operations() as counter:
            call()
        with FlopCounterMode(display=False) as flops:
            call()
        results[name] = Result(
            ratio=median,
            low=low,
            high=high,
            milliseconds=1000 * statistics.median(times[name]),
            memory=peaks[name] / peaks[reference],
            peak_megabytes=peaks[name] / 1e6,
            operations=counter.count,
            gigaflops=flops.get_total_flops() / 1e9,
        )
    return results


def markdown(title: str, results: dict[str, Result], targets: dict[str, dict[str, float]]) -> str:
    """The table, with the targets of each variant for "ratio" and "memory" and whether they are met."""
    lines = [
        f"**{title}**\n",
        "| variant | time | quartiles | wanted | memory | wanted | ms | peak MB | operations | GFLOP |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        wanted = {"ratio": "", "memory": ""}
        for kind, target in targets.get(name, {}).items():
            met = round(getattr(result, kind), 2) <= target
            wanted[kind] = f"{target:.2f}, {'met' if met else 'missed'}"
        lines.append(
            f"| {name} | {result.ratio:.2f} | {result.low:.2f} to {result.high:.2f} | {wanted['ratio']} | "
            f"{result.memory:.2f} | {wanted['memory']} | {result.milliseconds:.1f} | {result.peak_megabytes:.1f} | "
            f"{result.operations} | {result.gigaflops:.2f} |"
        )
    return "\n".join(lines) + "\n"


def as_json(results: dict[str, Result]) -> dict:
    return {name: {key: round(value, 4) for key, value in asdict(result).items()} for name, result in results.items()}
