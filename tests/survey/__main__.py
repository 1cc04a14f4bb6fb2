"""Runs the quick starts, each in a process of its own, and writes what they left: `make survey`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.survey.cell import CELLS, Cell, read_cell
from tests.survey.filing import table, text
from tests.survey.outcome import Outcome, from_json

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build/survey"
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",  # no quick start may fetch a model
    "MPLBACKEND": "Agg",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": str(ROOT),
    "WANDB_MODE": "disabled",
}


def run_cell(file: Path, limit: float) -> Outcome:
    """Run a quick start in a process of its own, in an empty folder, for at most so many seconds."""
    cell = read_cell(file)
    outcome = Outcome(name=cell.name, package=cell.package)
    try:
        outcome = replace(outcome, version=importlib.metadata.version(cell.package))
    except importlib.metadata.PackageNotFoundError:
        return outcome
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "tests.survey.child", str(file.resolve())]
        try:
            ran = subprocess.run(
                command, cwd=folder, env=os.environ | _SETTINGS, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return replace(outcome, error=f"it took more than {limit:g} s")
    if ran.returncode != 0 or not ran.stdout:
        last = next((line for line in reversed(ran.stderr.splitlines()) if line.strip()), f"exit status {ran.returncode}")
        return replace(outcome, error=last.replace("|", "/")[:150])
    return from_json(ran.stdout)


def write(cell: Cell, outcome: Outcome, folder: Path) -> None:
    """Write the text to be filed on a quick start that left memory."""
    if outcome.leaks:
        (folder / f"{outcome.name}.md").write_text(text(cell, outcome, importlib.metadata.version("torch")))


def main(arguments: Sequence[str]) -> None:
    """Run those named, or all, and print the table."""
    parser = argparse.ArgumentParser(prog="tests.survey", description=__doc__)
    parser.add_argument("names", nargs="*", help="quick starts; all if none is named")
    parser.add_argument("--limit", type=float, default=240, help="seconds for each (%(default)s)")
    given = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for file in [CELLS / f"{name}.py" for name in given.names] or sorted(CELLS.glob("*.py")):
        outcome = run_cell(file, given.limit)
        outcomes.append(outcome)
        (BUILD / f"{file.stem}.md").unlink(missing_ok=True)
        write(read_cell(file), outcome, BUILD)
        (BUILD / f"{file.stem}.json").write_text(outcome.to_json() + "\n")
        print(table([outcome]).splitlines()[2], flush=True)
    (BUILD / "table.txt").write_text(table(outcomes))
    print(f"\n{table(outcomes)}\nTexts to be filed: {BUILD.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
