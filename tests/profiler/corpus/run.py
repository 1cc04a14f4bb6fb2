"""Runs the corpus in notebooks of this process and prints what each report says first.

`python -m tests.profiler.corpus.run [-v] [--json] [--stop-on-nan] [FRAMEWORK[:WORDS] | FRAMEWORK:=NAME] …`: cases whose names
contain the words, or are just that; all without any. `-v` prints the whole reports, `--stop-on-nan` is an option of theirs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from nbguard.errors import StoppedAtNaN
from tests.frozen import frozen_libraries
from tests.profiler.corpus.cases import FRAMEWORKS, NEEDS, Case, cases_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The first sentence of one case's report."""

    framework: str  # of the case
    name: str  # of the case
    first: tuple[str, ...]  # the sentences with which the report begins; of a fit that failed, its error
    verdict: str  # on the first of them
    seconds: float  # that the case took


def run(framework: str, names: list[str]) -> Iterator[Said]:
    """Run a framework's cases of these names, or all; each in a namespace of its own.

    Looks leave out the objects of libraries, in no thorough run.
    """
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "nbguard")
    preamble, cases = cases_of(framework)
    shell.run_cell(preamble)
    with frozen_libraries():
        for case in cases:
            if names and not any(name == f"={case.name}" or name in case.name for name in names):
                continue
            begun = time.perf_counter()
            first = _first(shell, preamble, case)
            yield Said(
                framework=framework,
                name=case.name,
                first=first,
                verdict=case.verdict(first[0]),
                seconds=round(time.perf_counter() - begun, 2),
            )


def _first(shell: Any, preamble: str, case: Case) -> tuple[str, ...]:
    from nbguard.training.profiler.profile import FitProfile

    reports: list[Any] = []
    finish = FitProfile.finish

    def finished(profile: FitProfile, *args: Any, **kw: Any) -> Any:
        reports.append(finish(profile, *args, **kw))
        return reports[-1]

    profiled = "%%profile_fit" + (" --stop-on-nan" if "--stop-on-nan" in sys.argv else "") + "\n" + case.cells[-1]
    shell.reset()
    FitProfile.finish = finished  # type: ignore[method-assign,assignment]
    try:
        for cell in (preamble, *case.cells[:-1], profiled):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                result = shell.run_cell(cell, store_history=True)
            if not result.success and cell != profiled:
                return (f"the case itself fails: {said.getvalue()[-2000:]}",)
    finally:
        FitProfile.finish = finish  # type: ignore[method-assign]
    if not reports:
        return (f"no report: {said.getvalue()[-1500:]}",)
    if not result.success and not isinstance(result.error_in_exec, StoppedAtNaN):
        return (f"the fit failed: {said.getvalue()[-1500:]}",)
    (report,) = reports
    if "-v" in sys.argv:
        print(report.mimebundle()["text/plain"])
    return tuple(report.first)


def main(arguments: list[str]) -> None:
    """Run what the command line names."""
    if sys.platform == "linux":  # a forked worker knows a notebook's classes; Python 3.14 forks only if it is told to
        multiprocessing.set_start_method("fork", force=True)
    wanted: dict[str, list[str]] = {}
    for argument in arguments:
        if not argument.startswith("-"):
            framework, _, words = argument.partition(":")
            wanted.setdefault(framework, []).extend([words] if words else [])
    said = []
    for framework, names in (wanted or {name: [] for name in FRAMEWORKS}).items():
        if importlib.util.find_spec(NEEDS[framework]) is None:
            print(f"{framework}: left out, {NEEDS[framework]} is not installed here", file=sys.stderr)
            continue
        for one in run(framework, names):
            said.append(one)
            line = json.dumps(asdict(one)) if "--json" in arguments else _line(one)
            print(line, file=sys.__stdout__, flush=True)
    if "--json" not in arguments:
        print(dict(Counter(one.verdict for one in said)))


def _line(said: Said) -> str:
    return f"{said.verdict:20} {said.framework}: {said.name} ({said.seconds:.1f} s)\n    " + "\n    ".join(said.first)


if __name__ == "__main__":
    main(sys.argv[1:])
