"""How long naming every holder takes, beside other ways to look at the same heap, in one run.

    python tests/benchmarks/census.py [--rounds 5] [--scene NAME]

Scenes, each with fastai, pandas and matplotlib loaded:
  objects        plain records up to a million objects that Python's gc tracks, four Learners, a table, a figure; 10 names
  tensors        10,000 tensors in lists and dicts, 10 names
  graph          an autograd graph of 2,000 nodes, kept by a loss and a list of activations
Compared:
  one pass       a type-cached pass over gc.get_objects(): the least that finding the tensors costs (they stay unexplained)
  nbguard        the report, with the compiled walk (where there is one) and with Python's; the plan of %reset_gpu (--dry-run);
                 and %reset_gpu itself, with nothing to do
  MemReporter    pytorch_memlab's: a flat list of tensors with the names of parameters, without holders
  objgraph       find_backref_chain, which names a holder, for a sample of the same tensors, scaled to all of them
The last two are installed for the benchmark only (make bench does it). The ways take turns, so that a busy machine slows all of
them; medians and the median of each round's ratio are printed. It never fails by time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import io
import statistics
import time
from collections.abc import Callable

import matplotlib.pyplot
import numpy as np
import pandas as pd
import torch
from fastai.vision.all import CrossEntropyLossFlat, DataLoaders, Learner, nn

import nbguard
from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import plan_cleanup
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.reports.report import build_report
from nbguard.memory.scan.heap import native
from nbguard.memory.scan.scan import Notebook, scan

_OBJECTS = 1_000_000


def objects() -> dict[str, object]:
    """Return ten names: four Learners, a handle on one, tables, a figure, and records up to a million objects."""
    names: dict[str, object] = {f"learn{n}": _learner() for n in range(4)}
    names["model"] = names["learn0"].model  # type: ignore[attr-defined]
    names["losses"] = [torch.rand(()) for _ in range(100)]
    names["x"] = torch.rand(64, 3, 32, 32)
    names["frame"] = pd.DataFrame(np.random.default_rng(0).random((200_000, 20)))
    names["figure"] = matplotlib.pyplot.figure()
    records: list[dict[str, object]] = []
    while len(gc.get_objects()) < _OBJECTS:
        records += [{"id": n, "name": str(n), "parts": [1, 2, {"x": [n]}], "box": [[n, 0.5]]} for n in range(20_000)]
    names["records"] = records
    gc.collect()
    return names


def tensors() -> dict[str, object]:
    """Return ten names of 10,000 tensors: lists and dicts of them, one with views of the others'."""
    names: dict[str, object] = {f"runs{n}": [torch.rand(10) for _ in range(1000)] for n in range(7)}
    names["by_step"] = {n: {"loss": torch.rand(()), "out": torch.rand(4)} for n in range(1000)}
    names["views"] = [t[1:] for t in names["runs0"]]  # type: ignore[attr-defined]
    names["one"] = torch.rand(3)
    return names


def graph() -> dict[str, object]:
    """Return two names that keep an autograd graph of 2,000 nodes."""
    weight = torch.rand(100, requires_grad=True)
    kept, x = [], weight
    for n in range(1000):
        x = (x * 1.001).sin()
        kept += [x] if n % 100 == 0 else []
    return {"loss": x.sum(), "kept": kept}


def _learner() -> Learner:
    rows = list(zip(torch.randn(64, 3, 8, 8), torch.randint(0, 10, (64,)), strict=True))
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(40)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    dls = DataLoaders.from_dsets(rows, rows, bs=16, num_workers=0, device=torch.device("cpu"))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat())


def one_pass() -> int:
    """Count the tensors of the heap, diagnosing each type once."""
    known: dict[type, bool] = {}
    found = 0
    for obj in gc.get_objects():
        cls = type(obj)
        wanted = known.get(cls)
        if wanted is None:
            wanted = known[cls] = issubclass(cls, torch.Tensor)
        found += wanted
    return found


def holder_report(names: dict[str, object]) -> int:
    """Name every holder with its paths' roots and retained bytes; return how many there are."""
    return len(build_report(Analysis(scan(Notebook(shell=None, namespace=names)).facts)).devices[0].holders)


def dry_run(names: dict[str, object]) -> int:
    """Plan a cleanup."""
    return plan_cleanup(scan(Notebook(shell=None, namespace=names)).facts, Request()).promised


def pure_report(names: dict[str, object]) -> int:
    """Name every holder, as without the compiled walk."""
    compiled, native.compiled = native.compiled, None
    try:
        return holder_report(names)
    finally:
        native.compiled = compiled


def idle_cleanup(names: dict[str, object]) -> int:
    """Clean up where nothing is stale."""
    return nbguard.release(namespace=names).realised


def mem_reporter() -> int:
    """Collect and print pytorch_memlab's flat list (into nowhere)."""
    from pytorch_memlab import MemReporter

    with contextlib.redirect_stdout(io.StringIO()) as text:
        MemReporter().report()
    return len(text.getvalue().splitlines())


def backref_chains(sample: list[torch.Tensor]) -> int:
    """Name a holder of each tensor of the sample with objgraph."""
    import objgraph

    names = {"holder": sample}
    found = 0
    for tensor in sample:
        found += len(objgraph.find_backref_chain(tensor, objgraph.is_proper_module, extra_ignore=(id(names), id(sample))))
    return found


def in_turns(rounds: int, ways: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds that each way took, round by round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return times


def compare(title: str, names: dict[str, object], rounds: int) -> None:
    """Time each way on the heap as it is, in turns, and print figures and ratios."""
    globals()["heap"] = names  # objgraph climbs to a module
    found = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]
    count, sample = len(found), found[:: max(1, len(found) // 10)][:10]
    del found
    walk = "the compiled walk" if native.compiled is not None else f"Python's walk, because {native.why_pure}"
    print(f"{title}: {len(gc.get_objects()):,} objects, {count:,} tensors, {rounds} rounds, {walk}", flush=True)
    report = "nbguard, every holder"
    ways: dict[str, Callable[[], object]] = {
        "one type-cached pass": one_pass,
        report: lambda: holder_report(names),
        "nbguard, Python's walk": lambda: pure_report(names),
        "nbguard, plan of a cleanup": lambda: dry_run(names),
        "nbguard, an idle cleanup": lambda: idle_cleanup(names),
    }
    if importlib.util.find_spec("pytorch_memlab"):
        ways["MemReporter, flat list"] = mem_reporter
    times = in_turns(rounds, ways)
    if importlib.util.find_spec("objgraph"):
        (seconds,) = in_turns(1, {"objgraph": lambda: backref_chains(sample)})["objgraph"]
        times[f"objgraph, {count:,} holders"] = [seconds / len(sample) * count] * rounds
    ways_of_ours = [name for name in times if name.startswith("nbguard")]
    least = times["one type-cached pass"]
    for name in ways_of_ours:
        ratios = [ours / one for ours, one in zip(times[name], least, strict=True)]
        print(f"  {name:<28} takes {statistics.median(ratios):>8.2f} times one type-cached pass", flush=True)
    for name, seconds_each in times.items():
        ratios = [ours / theirs for ours, theirs in zip(times[report], seconds_each, strict=True)]
        line = f"nbguard's report takes {statistics.median(ratios):>9.4f} times that"
        print(
            f"  {name:<28} {statistics.median(seconds_each) * 1000:>12,.1f} ms   {'' if name == report else line}", flush=True
        )


def main() -> None:
    """Build each scene, compare, and take it down again."""
    scenes: dict[str, Callable[[], dict[str, object]]] = {"tensors": tensors, "graph": graph, "objects": objects}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scene", choices=scenes, action="append")
    options = parser.parse_args()
    gc.collect()
    for title in options.scene or scenes:
        compare(title, scenes[title](), options.rounds)
        globals().pop("heap")
        gc.collect()


if __name__ == "__main__":
    main()
