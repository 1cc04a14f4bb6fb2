"""The fate of private pools on this machine's GPU: of graphs, of captures that failed, of a MemPool; a table.

python -m tests.gpu.pools
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_NUMBERS = 2_000_000
_held: dict[str, Any] = {}


@contextmanager
def _fails() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        _held["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _step(after: Callable[[Any], Any] = lambda out: None) -> None:
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(_NUMBERS, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = x * 2 + 1
        after(out)
    _held.update(graph=graph, x=x, out=out)


def graph() -> None:
    """Record a graph and replay it."""
    _step()
    _held["graph"].replay()


def asks() -> None:
    """Ask for a value while recording."""
    with _fails():
        _step(lambda out: out.sum().item())


def raises() -> None:
    """Raise an error of Python's while recording."""

    def broken(_: Any) -> None:
        raise ValueError("broken")

    with _fails():
        _step(broken)


def too_large() -> None:
    """Ask for more than there is while recording."""
    with _fails():
        _step(lambda out: torch.empty(1 << 40, device="cuda"))


def pool() -> None:
    """Fill a MemPool."""
    own = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(own):
        _held["out"] = torch.ones(_NUMBERS, device="cuda")
    _held["pool"] = own


CASES = {function.__name__: function for function in (graph, asks, raises, too_large, pool)}


def _measured(name: str) -> dict[str, Any]:
    torch.ones(1, device="cuda")
    states = {"before": torch.cuda.memory_reserved()}
    CASES[name]()
    error = _held.pop("error", "")
    gc.collect()
    states["made"] = torch.cuda.memory_reserved()
    _held.pop("out", None)
    gc.collect()
    states["without its tensors"] = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    states["without its tensors, emptied"] = torch.cuda.memory_reserved()
    _held.clear()
    gc.collect()
    states["deleted"] = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    states["deleted, emptied"] = torch.cuda.memory_reserved()
    with _fails():
        graph()
    if "error" in _held:
        error += f" | a graph after it: {_held['error']}"
    _held.clear()
    gc.collect()
    torch.cuda.empty_cache()
    states["after another graph, emptied"] = torch.cuda.memory_reserved()
    return {"case": name, "error": error, "states": states}


def _table() -> Iterator[str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.pools"]
    started = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in CASES]
    for name, process in zip(CASES, started, strict=True):
        lines = process.communicate()[0].splitlines()
        if not lines:
            yield f"| {name} | no answer |"
            continue
        found = json.loads(lines[-1])
        if name == next(iter(CASES)):
            yield f"| MiB reserved | {' | '.join(found['states'])} | error |"
            yield f"|---|{'---|' * (len(found['states']) + 1)}"
        sizes = (f"{nbytes / 2**20:g}" for nbytes in found["states"].values())
        yield f"| {name} | {' | '.join(sizes)} | {found['error'][:120]} |"


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(_measured(sys.argv[1])))
    else:
        print(*_table(), sep="\n")
