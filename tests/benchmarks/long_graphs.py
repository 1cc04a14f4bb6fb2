"""How long a scan of a long autograd graph and of very many tensors takes, beside one pass over the heap, in one run.

    python tests/benchmarks/long_graphs.py

`pass` is `gc.get_objects()` with the type of each object: the least that any search of the heap does. A scan leaves out what
is too deep or too much (docs/adr/0012-long-graphs.md); `kept` is what the process has grown by after three scans.
"""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

CASES = {
    "chain of 200,000 operations": "x = torch.ones(1, requires_grad=True) * 1.\nfor _ in range(200_000): x = x * 1.",
    "dict of 1,000,000 tensors": "x = {n: torch.ones(1) for n in range(1_000_000)}",
    "100,000 graphs of 2 operations": "x = [(torch.ones(1, requires_grad=True) * 2).exp() for n in range(100_000)]",
}


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1024**2


def measure(name: str) -> None:
    """Print the row of one case; in a process of its own."""
    import torch

    from nbguard.memory.scan.scan import Notebook, scan

    scan(Notebook(shell=None, namespace={}))
    names: dict[str, object] = {"torch": torch}
    exec(CASES[name], names)
    before, scans, passes = _resident(), [], []
    for _ in range(3):
        start = time.perf_counter()
        list(map(type, gc.get_objects()))
        passes.append(time.perf_counter() - start)
        start = time.perf_counter()
        seen = scan(Notebook(shell=None, namespace={"x": names["x"]}))
        scans.append(time.perf_counter() - start)
    left = "all" if seen.facts.unwalked is None else "in part"
    ratio = min(scans) / min(passes)
    print(f"  {name:32} {min(scans):6.2f} s  {ratio:6.1f} x a pass  kept {_resident() - before:5.1f} MiB  walked {left}")


if __name__ == "__main__":
    if sys.argv[1:]:
        measure(sys.argv[1])
    else:
        print("scans of long graphs and of many tensors (quickest of three)")
        for case in CASES:
            subprocess.run(
                [sys.executable, "-W", "ignore", __file__, case], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
            )
