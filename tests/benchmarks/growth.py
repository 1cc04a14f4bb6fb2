"""How the cost of a scan, a tick, a plan, a report and a replay grows with the heap, the device and the trace, with exponents.

    python tests/benchmarks/growth.py [--rounds 3] [--large] [--subject NAME]

Processor time, the best of the rounds. An exponent is the slope of the logarithms of the time above that of the empty case, by
the sizes that take at least a twentieth more: 1 is proportional, and above 1.1 something is searched again and again.
--large adds ten times the largest size of records and events (10 million objects take 2 GB).
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from nbguard.frontend.sidebar.hub.tick_source import TickSource
from nbguard.frontend.sidebar.protocol.ticks import LastLook
from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts
from nbguard.memory.reports.report import build_report
from nbguard.memory.scan.pause import keep_garbage
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment
from tests.benchmarks.replay import speed, synthetic

_MORE = 0.05
"""Share of the empty case's time that a size must add to count in the exponent."""
_GOAL = 1.1

Ways = dict[str, Callable[[], object]]
"""What is timed, by its name."""


def _of_heap(names: dict[str, Any]) -> Ways:
    """Return a scan of these names, and on its facts a plan and a report; a tick beside them."""
    facts = scan(Notebook(shell=None, namespace=names)).facts
    ticks = TickSource("growth", lambda: None)
    return {
        "scan": lambda: scan(Notebook(shell=None, namespace=names)),
        **_of_facts(facts),
        "tick": lambda: ticks.tick(LastLook(), None, ()),
    }


def _of_facts(facts: Facts) -> Ways:
    return {"plan": lambda: plan_cleanup(facts, Request()), "report": lambda: _report(facts)}


def _report(facts: Facts) -> None:
    with keep_garbage():  # as `nbguard.report` does
        build_report(Analysis(facts))


def plain_objects(count: int) -> Ways:
    """Objects of plain data below one name, two in each record."""
    return _of_heap({"records": [{"id": n, "parts": [n]} for n in range(count // 2)], "x": torch.ones(10)})


def objects_with_a_tensor(count: int) -> Ways:
    """Objects that all lead to a tensor: a list of pairs, each in a dict."""
    tensor = torch.ones(10)
    return _of_heap({"records": [{"pair": [n, tensor]} for n in range(count // 2)], "x": tensor})


def tensors(count: int) -> Ways:
    """Tensors in ten lists."""
    return _of_heap({f"list{k}": [torch.ones(4) for _ in range(count // 10)] for k in range(10)})


def holders(count: int) -> Ways:
    """Names of a list each, which share every tenth tensor with a neighbour."""
    made = [torch.ones(4) for _ in range(count)]
    return _of_heap({f"name{n}": [made[n], *([made[n - 1]] if n % 10 == 0 else [])] for n in range(count)})


def streams(count: int) -> Ways:
    """Streams of a device, each with two segments of four blocks, of which one name holds the first."""
    whole = ((1 << 20, "active_allocated"), (1 << 19, "inactive"), (1 << 18, "active_pending_free"), (1 << 18, "inactive"))
    segments = [
        make_segment(*whole, address=(1 + n) << 24, stream=stream)
        for n, stream in enumerate(s for s in range(count) for _ in "ab")
    ]
    graph = make_graph(
        {"x": ["t"]} if count else {}, storages={"t": 1 << 20} if count else {}, kinds={"t": "tensor"}, device="cuda:0"
    )
    return _of_facts(make_facts(graph, device=make_cuda_device(segments, 1 << 36, 1 << 34)))


def events(count: int) -> Ways:
    """Events of a recorded trace, replayed on the allocator's model."""
    snapshot = synthetic(max(count, 1000))
    return {"replay": lambda: speed(snapshot, 1)}


SUBJECTS: dict[str, tuple[Callable[[int], Ways], tuple[int, ...], bool]] = {
    "plain objects": (plain_objects, (100_000, 300_000, 1_000_000), True),
    "objects with a tensor": (objects_with_a_tensor, (10_000, 30_000, 100_000, 300_000), False),
    "tensors": (tensors, (100, 1_000, 10_000, 100_000), False),
    "holders": (holders, (100, 1_000, 10_000), False),
    "streams": (streams, (100, 300, 1_000, 3_000, 10_000), False),
    "events": (events, (10_000, 30_000, 100_000), True),
}
"""The maker of each case, its sizes, and whether --large adds ten times the largest."""


def measured(make: Callable[[int], Ways], sizes: Sequence[int], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of processor time of each way by size, the empty case first."""
    times: dict[str, list[float]] = {}
    for size in (0, *sizes):
        ways = make(size)
        gc.collect()
        for name, call in ways.items():
            times.setdefault(name, []).append(min(_seconds(call) for _ in range(rounds)))
        del ways
    return times


def _seconds(call: Callable[[], object]) -> float:
    begun = time.process_time()
    call()
    return time.process_time() - begun


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float | None:
    """Return the slope of the logarithms; `seconds` has the empty case first. None where fewer than two sizes cost anything."""
    none, *some = seconds
    points = [(math.log(n), math.log(t - none)) for n, t in zip(sizes, some, strict=True) if t > (1 + _MORE) * none + 1e-4]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*map(list, zip(*points, strict=True))).slope  # type: ignore[arg-type]


def table(rounds: int, large: bool, subjects: Sequence[str]) -> Iterator[str]:
    """Yield the rows of the table, as they are measured."""
    for subject in subjects:
        make, sizes, may_grow = SUBJECTS[subject]
        sizes = (*sizes, 10 * sizes[-1]) if large and may_grow else sizes
        yield f"{subject}: {', '.join(f'{size:,}' for size in (0, *sizes))}"
        for name, seconds in measured(make, sizes, rounds).items():
            slope = exponent(sizes, seconds)
            told = "does not grow" if slope is None else f"n^{slope:.2f}{'' if slope <= _GOAL else '   above the goal'}"
            yield f"  {name:<8} {' '.join(f'{1000 * each:>9,.1f}' for each in seconds)} ms   {told}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--subject", choices=SUBJECTS, action="append")
    options = parser.parse_args()
    for line in table(options.rounds, options.large, options.subject or tuple(SUBJECTS)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
