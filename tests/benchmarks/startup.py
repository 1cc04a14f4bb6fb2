"""What `import nbguard` and `%load_ext nbguard` add to a bare interpreter and to a bare IPython, in one run.

python tests/benchmarks/startup.py [--rounds 15]

Then the processor time of commands of the terminal from their start to their end: of wrong lines, which are to be told in 0.4 s
and without PyTorch, and of the doctor on the environment (1 s), beside the time of an `import torch`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_SHELL = "from IPython.core.interactiveshell import InteractiveShell; shell = InteractiveShell.instance()"

_FILES = {"train.py": "learn = 1\n", "broken.py": "for\n", "other.json": "{}"}
_LINES = (
    "diagnoze FILE",
    "diagnose nowhere.pickle",
    "map other.json",
    "diff one.pickle",
    "replay other.json",
    "whatif nowhere.pickle",
    "gpus all",
    "doctor train:lern",
    "doctor broken:learn",
    "doctor train:learn --golden other.json",
    "lint nowhere.py",
    "predict broken.py",
    "predict train.py --time other.json",
    "run nowhere.py",
    "report nowhere",
    "profile other.json",
    "compare other.json other.json",
    "lock nowhere.py",
    "schema nothing",
    "mcp nowhere",
    "doctor --environment",
)


def spent(*arguments: str, folder: str) -> float:
    """Return the processor time of a Python with these arguments, in seconds."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], capture_output=True, cwd=folder, check=False)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def commands(rounds: int) -> None:
    """Print the processor time of each line beside an import of PyTorch, the least of the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in _FILES.items():
            (Path(folder) / name).write_text(text)
        torch = min(spent("-c", "import torch", folder=folder) for _ in range(rounds))
        for line in _LINES:
            seconds = min(spent("-m", "nbguard", *line.split(), folder=folder) for _ in range(rounds))
            print(f"  nbguard {line:<40} {seconds * 1000:8.1f} ms   of import torch {seconds / torch:6.2f}")


def median(rounds: int, setup: str, code: str) -> float:
    """Return the median time of `code` in fresh interpreters after `setup`, in seconds."""
    timed = f"{setup}\nimport time; t = time.perf_counter()\n{code}\nprint(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True) for _ in range(rounds)]
    return statistics.median(float(run.stdout.splitlines()[-1]) for run in runs)


def main() -> None:
    """Print the times and, for scale, what importing numpy takes in the same run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    figures = {
        "import nbguard": median(rounds, "", "import nbguard"),
        "%load_ext nbguard": median(rounds, _SHELL, "shell.run_line_magic('load_ext', 'nbguard')"),
        "import numpy": median(rounds, "", "import numpy"),
    }
    for name, seconds in figures.items():
        print(f"  {name:<20} {seconds * 1000:8.1f} ms   of import numpy {seconds / figures['import numpy']:6.2f}")
    commands(max(1, rounds // 5))


if __name__ == "__main__":
    main()
