"""GPU day: everything that wants a real GPU, in one command, for the rare day on which one is at hand.

    python -m tests.gpu.day                 run, then put recordings and figures in their places (make gpu-day)
    python -m tests.gpu.day --out DIR       run, and leave everything in DIR: for a machine from which only files come back
    python -m tests.gpu.day --adopt PLACE   put what an earlier run left (DIR, or its gpu-day.tar.gz) in its places
    python -m tests.gpu.day --dry           the same program on the fake runtime: nothing leaves DIR

Needs Python, torch and pytest, and nothing from a network. Each step runs in a process of its own with a time limit; one that
fails is reported and the others still run. It looks at one GPU and changes none of its settings.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.util
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.gpu import child, device
from tests.gpu.bundle import adopt, bundle
from tests.gpu.child import ROOT
from tests.gpu.recording import load_all
from tests.gpu.section import text
from tests.gpu.steps import Step, steps

_DEADLINE = 500.0
_BESIDE = max(1, min(6, (os.cpu_count() or 1) // 2))
"""Steps that run beside each other."""


class Day:
    """One run: its clock, its log, and what failed."""

    def __init__(self, work: Path, deadline: float, started: float | None = None) -> None:
        self.work, self.deadline = work, deadline
        self.failed: list[str] = []
        self.outputs: dict[str, str] = {}
        self._started = time.monotonic() if started is None else started
        self._log = (work / "log.txt").open("a", encoding="utf-8")

    @property
    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._started

    def say(self, words: str, *, details: str = "") -> None:
        """Print a line of progress; the log gets the details too."""
        line = f"[{self.elapsed:6.1f} s] {words}"
        print(line, flush=True)
        self._log.write(f"{line}\n{details}\n" if details else f"{line}\n")
        self._log.flush()

    def do_all(self, steps: Iterable[Step]) -> None:
        """Run the steps in their order, those beside each other that may."""
        for is_alone, alike in itertools.groupby(steps, key=lambda step: step.is_alone):
            with concurrent.futures.ThreadPoolExecutor(1 if is_alone else _BESIDE) as pool:
                for _ in pool.map(self.do, alike):
                    pass

    def do(self, step: Step) -> None:
        """Run a step within what is left of the day, and note how it ended."""
        missing = [name for name in step.needs if importlib.util.find_spec(name) is None]
        if missing:
            self.say(f"skipped   {step.name}: {', '.join(missing)} not installed")
            return
        left = self.deadline - self.elapsed
        if left < 1:
            self.failed.append(step.name)
            self.say(f"NOT RUN   {step.name}: out of time")
            return
        limit = min(step.limit, left)
        ended = child.run(step.arguments, limit, step.environment)
        if ended.status == 0:
            self.say(f"ok        {step.name}: {ended.last_line} ({ended.seconds:.1f} s)", details=ended.output)
            if step.title:
                self.outputs[step.title] = ended.output
            return
        self.failed.append(step.name)
        why = f"stopped after {limit:.0f} s" if ended.status is None else ended.last_line
        self.say(f"FAILED    {step.name}: {why} ({ended.seconds:.1f} s)", details=ended.output)
        if "pytest" in step.arguments:
            print(*(line for line in ended.output.splitlines() if line.startswith(("FAILED", "ERROR"))), sep="\n", flush=True)


def run(out: Path, *, dry: bool, deadline: float) -> int:
    """Run the day, leave its files in `out`, and return the exit status."""
    started = time.monotonic()
    try:
        facts = device.ask()
        reason = device.refusal(facts, dry=dry)
    except AssertionError as error:  # torch does not import, or the driver hangs
        reason = f"the GPU could not be asked for: {str(error).strip().splitlines()[-1]}"
    if reason:
        print(f"gpu-day: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        work = Path(folder)
        (work / "recordings").mkdir()
        day = Day(work, deadline, started)
        try:
            major, minor = facts["capability"]
            day.say(f"{facts['name']}, compute capability {major}.{minor}, driver {facts['driver']}")
            day.say(", ".join(f"{name} {version or 'missing'}" for name, version in facts["versions"].items()))
            day.do_all(steps(work, dry=dry))
        except (KeyboardInterrupt, SystemExit):
            day.failed.append("interrupted")
        try:
            (work / "section.md").write_text(_section(day, facts, dry=dry), encoding="utf-8")
        except Exception as error:  # what was recorded must come home whatever happens here
            day.failed.append("section")
            day.say(f"FAILED    section: {error!r}")
        day.say(f"failed: {', '.join(day.failed)}" if day.failed else "all done")
        bundle(work, out)
    print(f"gpu-day: {out}/gpu-day.tar.gz", flush=True)
    return 1 if day.failed else 0


def _section(day: Day, facts: dict[str, Any], *, dry: bool) -> str:
    figures = day.work / "bench.json"
    recordings = [recording for _, recording in load_all(day.work / "recordings")]
    return text(facts, json.loads(figures.read_text()) if figures.exists() else None, recordings, day.outputs, dry=dry)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="leave everything there and touch nothing else")
    parser.add_argument("--adopt", type=Path, metavar="PLACE", help="run nothing: take over what an earlier run left")
    parser.add_argument("--dry", action="store_true", help="on the fake runtime")
    parser.add_argument("--deadline", type=float, default=_DEADLINE, metavar="S", help=f"seconds for all ({_DEADLINE:.0f})")
    options = parser.parse_args()
    if options.adopt is not None:
        return adopt(options.adopt)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # whoever ends us early still gets what there is
    out = options.out or ROOT / "build/gpu-day"
    status = run(out, dry=options.dry, deadline=options.deadline)
    if options.out is None and not options.dry and status != 2:
        status = adopt(out) or status
    return status


if __name__ == "__main__":
    sys.exit(main())
