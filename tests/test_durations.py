"""The page of the slowest tests."""

from __future__ import annotations

from pathlib import Path

from tests.durations import durations, page

_FILE = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.ui.test_line" name="test_a[x]" time="2.5"/>
<testcase classname="tests.ui.test_line" name="test_b" time="1"/>
<testcase classname="tests.test_units" name="test_c" time="3"/>
</testsuite></testsuites>"""


def test_files_and_tests_stand_with_the_slowest_first(tmp_path: Path) -> None:
    (tmp_path / "1.xml").write_text(_FILE, encoding="utf-8")

    shown = page(durations([tmp_path / "1.xml"]), most=1)

    assert [line.split() for line in shown.splitlines() if line] == [
        ["6.5", "s", "all", "3", "tests"],
        ["3.5", "s", "tests/ui/test_line.py"],
        ["3.0", "s", "tests/test_units.py::test_c"],
    ]
