"""What `import nbguard` and `%load_ext nbguard` add to a bare interpreter and to a bare IPython, in one run.

python tests/benchmarks/startup.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

_SHELL = "from IPython.core.interactiveshell import InteractiveShell; shell = InteractiveShell.instance()"


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


if __name__ == "__main__":
    main()
