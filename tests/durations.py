"""Where the tests' time goes, from the files of `--junitxml`: python -m tests.durations build/junit/*.xml --most 20."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree


def durations(files: Iterable[Path]) -> Counter[str]:
    """Return the seconds of each test, with those of its fixtures, as `tests/FOLDER/test_FILE.py::NAME`."""
    seconds: Counter[str] = Counter()
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            place = (case.get("classname") or "").replace(".", "/")
            seconds[f"{place}.py::{case.get('name')}"] += float(case.get("time") or 0)
    return seconds


def page(seconds: Counter[str], most: int) -> str:
    """Return the slowest files, and the slowest tests, as text."""
    by_file: Counter[str] = Counter()
    for test, time in seconds.items():
        by_file[test.partition("::")[0]] += time
    parts = [f"{sum(seconds.values()):8.1f} s  all {len(seconds)} tests"]
    parts += ["", *(f"{time:8.1f} s  {file}" for file, time in by_file.most_common(most))]
    parts += ["", *(f"{time:8.1f} s  {test}" for test, time in seconds.most_common(most))]
    return "\n".join(parts)


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=20)
    words = parser.parse_args()
    print(page(durations(file for file in words.files if file.exists()), words.most))


if __name__ == "__main__":
    main()
