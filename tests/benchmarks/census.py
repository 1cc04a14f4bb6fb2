"""How long naming every holder of a large heap takes, beside three other ways to look at the same heap, in one run.

    python tests/benchmarks/census.py [--rounds 5]

The heap: fastai, pandas and matplotlib loaded, four Learners, a DataFrame, and plain records up to a million objects that
Python's gc tracks. Compared:
  one pass       a type-cached pass over gc.get_objects(): the least that finding the tensors costs (they stay unexplained)
  MemReporter    pytorch_memlab's: a flat list of tensors with the names of parameters, without holders
  objgraph       find_backref_chain, which names a holder, for a sample of the same tensors, scaled to all of them
Both are installed for the benchmark only (make bench does it). Prints medians and ratios; it never fails by time.
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

from nbguard.core.report import build_report
from nbguard.probes.look import Notebook, look

_OBJECTS = 1_000_000


def build_heap() -> dict[str, object]:
    """Return the names of the heap: four trained-size Learners, tables, a figure, and records up to a million objects."""
    names: dict[str, object] = {"learners": [_learner() for _ in range(4)]}
    names["frame"] = pd.DataFrame(np.random.default_rng(0).random((200_000, 20)))
    names["figure"] = matplotlib.pyplot.figure()
    records: list[dict[str, object]] = []
    while len(gc.get_objects()) < _OBJECTS:
        records += [{"id": n, "name": str(n), "parts": [1, 2, {"x": [n]}], "box": [[n, 0.5]]} for n in range(20_000)]
    names["records"] = records
    gc.collect()
    return names


def _learner() -> Learner:
    rows = list(zip(torch.randn(64, 3, 8, 8), torch.randint(0, 10, (64,)), strict=True))
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(40)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    dls = DataLoaders.from_dsets(rows, rows, bs=16, num_workers=0, device=torch.device("cpu"))
    return Learner(dls, model, loss_func=CrossEntropyLossFlat())


def one_pass() -> int:
    """Count the tensors of the heap, judging each type once."""
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
    return len(build_report(look(Notebook(None, names)).facts).devices[0].holders)


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


def median(rounds: int, call: Callable[[], object]) -> float:
    """Return the median time of `rounds` calls, in seconds."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Build the heap, time each way in turn, and print figures and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    names = build_heap()
    globals()["heap"] = names  # objgraph climbs to a module
    tensors = [obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]
    count, sample = len(tensors), tensors[:: max(1, len(tensors) // 10)][:10]
    del tensors
    print(f"{len(gc.get_objects()):,} objects, {count:,} tensors; median of {rounds} rounds", flush=True)
    figures = {
        "one type-cached pass": median(rounds, one_pass),
        "nbguard, every holder": median(rounds, lambda: holder_report(names)),
    }
    if importlib.util.find_spec("pytorch_memlab"):
        figures["MemReporter, flat list"] = median(rounds, mem_reporter)
    if importlib.util.find_spec("objgraph"):
        figures[f"objgraph, {count:,} holders"] = median(1, lambda: backref_chains(sample)) / len(sample) * count
    ours = figures["nbguard, every holder"]
    for name, seconds in figures.items():
        ratios = f"nbguard / this {ours / seconds:>9.4f}   this / nbguard {seconds / ours:>10.2f}"
        print(f"  {name:<28} {seconds * 1000:>12,.1f} ms   {ratios}")


if __name__ == "__main__":
    main()
