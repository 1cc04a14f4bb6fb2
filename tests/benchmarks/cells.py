"""What the hooks cost per cell, beside an empty hook and beside what other tools do after every cell, in one run.

    python tests/benchmarks/cells.py [--rounds 300] [--objects 1000000]

The heap: fastai loaded, a model of 800 tensors, and plain records up to a million objects that Python's gc tracks. IPython
fires the two events of a cell for:
  empty hook       two functions that do nothing
  nothing changed  `%gpumem cells on` and `%nbguard on --auto-clean-errors`, after a cell that changed no memory
  memory changed   the same after a cell that allocated: a look at the whole heap
  after errors     a look where the former of two errors still waits for the collector, beside one before them
  notices          after `%load_ext nbguard` alone: an idle cell, cells that bind or delete tensors, and one that deletes a
                   tensor which a list still holds (a look at the whole heap)
  collect          gc.collect() and, on a GPU, torch.cuda.empty_cache(): what per-cell monitors do to get exact figures
Prints medians; it never fails by time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from fastai.basics import nn
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

import nbguard.memory.cells.name_watch
from nbguard.frontend.notebook.session import session_of
from nbguard.memory.scan.scan import Notebook, scan


def median(rounds: int, act: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Return the median time of `act`, in seconds; `before` runs before each, untimed."""
    times = []
    for _ in range(rounds):
        before()
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class Cell:
    """Fires what IPython fires around a cell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._number = 0
        self.source = "x = 1"

    def begin(self) -> None:
        self._number += 1
        self._result = ExecutionResult(ExecutionInfo(self.source, True, False, True, None))
        self._result.execution_count = self._number
        self._shell.events.trigger("pre_run_cell", self._result.info)

    def end(self) -> None:
        self._shell.events.trigger("post_run_cell", self._result)

    def both(self) -> None:
        self.begin()
        self.end()


def heap(objects: int) -> dict[str, object]:
    """Return names that hold a model and as many plain objects as wanted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [nn.Linear(64, 64, device=device) for _ in range(400)]
    records: list[object] = []
    while len(gc.get_objects()) < objects:
        records += [{"id": n, "name": str(n), "parts": [1, 2, {"x": [n]}], "box": [[n, 0.5]]} for n in range(20_000)]
    gc.collect()
    return {"model": nn.Sequential(*layers), "records": records, "device": device}


def noticing(cell: Cell, shell: InteractiveShell, rounds: int) -> dict[str, float]:
    """Return the times of the hooks with nothing on but notices, by the kind of cell."""
    session = session_of(shell)
    session.notices.turn_on()
    device = str(shell.user_ns["device"])
    names = shell.user_ns
    cell.both()

    def timed(rounds: int, source: str, before: str = "") -> float:
        times = []
        for number in range(rounds):
            exec(before, {"torch": torch, "device": device}, names)
            cell.source = "x = 1"
            cell.both()
            cell.source = source.format(number)
            start = time.perf_counter()
            cell.begin()
            between = time.perf_counter()
            exec(cell.source, {"torch": torch, "device": device}, names)
            after = time.perf_counter()
            cell.end()
            times.append(time.perf_counter() - after + between - start)
        return statistics.median(times)

    made = "big = torch.ones(2 << 20, device=device)"
    figures = {
        "notices: an idle cell (goal: < 0.1 ms)": timed(rounds, "x = {0}"),
        "notices: a cell that binds tensors": timed(rounds, "t{0} = torch.ones(9, device=device)"),
        "notices: a cell that deletes a tensor": timed(rounds, "del big # {0}", made),
        "notices: a cell that deletes a model": timed(10, "del net # {0}", "net = torch.nn.Linear(9, 9)"),
        "notices: a tensor that is still held: a look": timed(5, "del big # {0}", f"{made}; kept = [big]"),
    }
    session.turn_off()
    for name in [name for name in names if (name[:1] == "t" and name[1:].isdigit()) or name == "kept"]:
        del names[name]  # what follows is timed on the heap that it had before
    return figures


def collect() -> None:
    """Do after a cell what gives exact figures by force."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def of_errors(shell: InteractiveShell) -> tuple[float, float]:
    """Return the median times of a look before any error and after two."""
    shell._showtraceback = lambda *_: None  # type: ignore[method-assign]
    shell.user_ns["fail"] = lambda batch: batch.missing

    def look() -> None:
        scan(Notebook(shell=shell, namespace=shell.user_ns))

    def fail_twice() -> None:
        for _ in range(2):
            shell.run_cell("import torch; fail(torch.ones(2 << 20))")

    gc.collect()
    return median(5, look), median(5, look, fail_twice)


def main() -> None:
    """Print the times side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--objects", type=int, default=1_000_000)
    options = parser.parse_args()
    shell = InteractiveShell.instance()
    shell.display_pub.publish = lambda *args, **kw: None  # type: ignore[method-assign]
    shell.user_ns.update(heap(options.objects))
    cell = Cell(shell)
    cell.both()
    bare = median(options.rounds, cell.both)
    hooks = {event: lambda _: None for event in ("pre_run_cell", "post_run_cell")}
    for event, hook in hooks.items():
        shell.events.register(event, hook)
    empty = median(options.rounds, cell.both)
    for event, hook in hooks.items():
        shell.events.unregister(event, hook)
    of_notices = noticing(cell, shell, options.rounds)
    nbguard.memory.cells.name_watch._TOO_SLOW = float("inf")  # a busy machine must not end the looks that are to be timed
    session = session_of(shell)
    session.turn_on(auto_clean_errors=True)
    session.recording.show_cells(on=True)
    cell.both()
    same = median(options.rounds, cell.both)

    kept: list[object] = []

    def grow() -> None:
        cell.begin()
        kept.append(torch.ones(2 << 20, device=str(shell.user_ns["device"])))

    changed = median(5, cell.end, grow)
    session.turn_off()
    before_errors, after_errors = of_errors(shell)
    forced = median(5, collect)
    rows = {
        "no hook": bare,
        "empty hook": empty,
        **of_notices,
        "nbguard, nothing changed (goal: < 2 ms)": same,
        "nbguard, memory changed: a look": changed,
        "nbguard, a look before errors": before_errors,
        "nbguard, a look after two errors": after_errors,
        "gc.collect() + empty_cache() after every cell": forced,
    }
    print(f"  {len(gc.get_objects()):,} objects, device {shell.user_ns['device']}")
    for name, seconds in rows.items():
        print(f"  {name:<48} {seconds * 1000:10.3f} ms")


if __name__ == "__main__":
    main()
