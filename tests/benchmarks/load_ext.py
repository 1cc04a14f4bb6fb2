"""What `%load_ext nbguard` adds to a kernel's start, beside an empty extension: each in fresh shells of ipykernel, in turns.

    python tests/benchmarks/load_ext.py [--rounds 11]

The shell is the one of a kernel, made in a process of its own that has done what every kernel does before a profile's
extensions are loaded; nobody has connected. The goal is a difference of less than 20 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_KERNEL = """
import os, sys, time
sys.path[:0] = PATH
from ipykernel.kernelapp import IPKernelApp
app = IPKernelApp.instance()
app.initialize(["--quiet"])
before = set(sys.modules)
start, spent = time.perf_counter(), time.process_time()
app.shell.run_line_magic("load_ext", sys.argv[1])
taken = time.perf_counter() - start, time.process_time() - spent, len(set(sys.modules) - before)
with open("taken", "w") as file:  # what is printed goes to the kernel's clients
    print(*taken, file=file)
os._exit(0)
"""
_EMPTY = "def load_ipython_extension(shell):\n    pass\n"


def load(extension: str, folder: str) -> tuple[float, float, int]:
    """Return the seconds that loading took, the processor's share of them, and how many modules came with it."""
    path = [folder, str(Path(__file__).resolve().parents[2])]
    command = [sys.executable, "-c", _KERNEL.replace("PATH", repr(path)), extension]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(Path(folder, "bytecode"))  # an installed package has its own
    subprocess.run(command, capture_output=True, check=True, cwd=folder, env=env)
    wall, spent, modules = Path(folder, "taken").read_text(encoding="utf-8").split()
    return float(wall), float(spent), int(modules)


def main() -> None:
    """Print medians, extremes, and the difference round by round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="nbguard-load-") as folder:
        Path(folder, "empty_extension.py").write_text(_EMPTY, encoding="utf-8")
        names = ("nbguard", "empty_extension")
        for name in names:
            load(name, folder)  # byte code and the disk's cache are there from now on
        times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in names}
        for number in range(rounds):
            for name in names if number % 2 else reversed(names):
                times[name].append(load(name, folder))
    for place, what in enumerate(("time", "processor time")):
        for name in names:
            values = [each[place] * 1000 for each in times[name]]
            print(f"  {what:<16} {name:<18} {statistics.median(values):8.2f} ms ({min(values):.2f} … {max(values):.2f})")
        pairs = [(a[place] - b[place]) * 1000 for a, b in zip(times[names[0]], times[names[1]], strict=True)]
        spread = f"({min(pairs):.2f} … {max(pairs):.2f})"
        print(f"  {what:<16} {'difference':<18} {statistics.median(pairs):8.2f} ms {spread} goal: < 20 ms")
    print(f"  modules          nbguard            {times['nbguard'][0][2]:8}")


if __name__ == "__main__":
    main()
