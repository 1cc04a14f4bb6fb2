"""The time of suites that leave nothing behind, with `pytest --gpu-leaks` and without, in turns in one run.

python tests/benchmarks/gpu_leaks.py [--rounds 5] [SUITE ...]

Without a SUITE (a folder or file that pytest runs in its own folder), the thousand clean tests of tests/gpu_leaks. The time is
the processor's, of the whole process.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu_leaks import clean, planted  # noqa: E402


def seconds(suite: Path, *options: str) -> tuple[float, str]:
    """Return the processor's time of one run of a suite, and the last line that it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *planted.OPTIONS, *options, str(suite)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder = suite if suite.is_dir() else suite.parent
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if not run.stdout.strip() or run.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"pytest did not run {suite}: {run.stderr.strip() or run.stdout.strip()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, run.stdout.strip().rpartition("\n")[2]


def compare(suite: Path, rounds: int, options: list[str]) -> None:
    """Print the medians of both, and their ratio."""
    with_it, without, said = [], [], ""
    for _ in range(rounds):
        without.append(seconds(suite, *options)[0])
        taken, said = seconds(suite, "--gpu-leaks", *options)
        with_it.append(taken)
    ratios = [a / b for a, b in zip(with_it, without, strict=True)]
    print(
        f"{suite.name:30} without {statistics.median(without):6.2f} s, with {statistics.median(with_it):6.2f} s, "
        f"ratio {statistics.median(ratios):.3f} (from {min(ratios):.3f} to {max(ratios):.3f}); {said}"
    )


def main() -> None:
    """Compare each suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--options", default="", help="further ones of pytest's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "test_clean.py"
        own.write_text(clean.SUITE, encoding="utf-8")
        for suite in args.suites or [own]:
            compare(suite.resolve(), args.rounds, args.options.split())


if __name__ == "__main__":
    main()
