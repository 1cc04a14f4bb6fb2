"""`pytest --gpu-leaks` in runs of its own: who holds what is named, and nothing is said about tests that leave nothing."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import nbguard
from tests.gpu_leaks import clean, planted

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.usefixtures("torch_process")


class Suite:
    """A folder with tests, run by pytest in a process of its own."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pytester = pytester
        self.folder = pytester.path
        monkeypatch.setenv("PYTHONPATH", str(Path(nbguard.__file__).parents[1]))
        monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
        monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
        self.write("conftest.py", planted.CONFTEST)

    def write(self, name: str, source: str) -> None:
        (self.folder / name).write_text(source, encoding="utf-8")

    def run(self, *options: str) -> pytest.RunResult:
        quiet = ("-p", "no:cacheprovider", "-q", "-rf")
        self.result = self._pytester.runpytest_subprocess(*planted.OPTIONS, *quiet, *options)
        self.text = self.result.stdout.str()
        return self.result

    def leaks(self, *options: str) -> dict[str, Any]:
        """Run with `--gpu-leaks`, and return what was found by test."""
        self.run("--gpu-leaks", "--gpu-leaks-json", "found.json", *options)
        self.data = json.loads((self.folder / "found.json").read_text(encoding="utf-8"))
        return {test["test"].partition("::")[2]: test for test in self.data["tests"]}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    return Suite(pytester, monkeypatch)


IMPORTS = "import pytest, torch\nKEPT = []\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_planted_leaks_are_each_named_with_their_holder(suite: Suite) -> None:
    suite.write("conftest.py", planted.WITH_OPTIMIZERS)
    suite.write("helpers.py", planted.HELPERS)
    suite.write("test_planted.py", planted.SUITE)

    found = suite.leaks()

    expected = {f"test_{kind}[{n}]": holder for kind, holder in planted.HOLDERS.items() for n in range(planted.COUNT)}
    holders = {name: [leak["holder"] for leak in test["leaks"]] for name, test in found.items()}
    assert holders.keys() == expected.keys(), suite.text
    assert {name: held for name, held in holders.items() if len(held) != 1 or not held[0].startswith(expected[name])} == {}
    assert all(test["leaks"][0]["nbytes"] < 2 << 20 for name, test in found.items() if "gradient" in name)
    assert all(test["leaks"][0]["nbytes"] == 2 << 20 for name, test in found.items() if "list" in name)
    suite.result.assert_outcomes(failed=len(expected))
    assert suite.result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_clean_tests_raise_no_alarm(suite: Suite) -> None:
    suite.write("test_clean.py", clean.SUITE)

    found = suite.leaks()

    assert {name: test["leaks"] for name, test in found.items() if test["leaks"]} == {}
    assert {name.partition("[")[0] for name, test in found.items() if test["collected"]} == {"test_a_cycle"}
    suite.result.assert_outcomes(passed=clean.COUNT)
    assert suite.data["judged"] == clean.COUNT
    assert not suite.data["problem"]


@pytest.mark.slow
def test_fixtures_hold_what_they_like_until_they_end(suite: Suite) -> None:
    suite.write(
        "test_fixtures.py",
        IMPORTS
        + """
@pytest.fixture(scope="module")
def bag():
    return []

@pytest.fixture(scope="class")
def kept_on():
    net = torch.nn.Linear(600, 600)
    KEPT.append(net)
    yield net

def test_first(bag):
    bag.append(torch.zeros(1 << 19))

class TestIt:
    def test_one(self, kept_on): pass
    def test_two(self, kept_on): pass

def test_last(bag):
    KEPT.append(bag)
""",
    )

    found = suite.leaks()

    assert found.keys() == {"TestIt::test_two", "test_last"}, suite.text
    assert [(leak["fixture"], leak["holder"]) for leak in found["TestIt::test_two"]["leaks"]] == [
        ("class fixture kept_on", "test_fixtures.py: KEPT[0].weight")
    ]
    assert [(leak["fixture"], leak["holder"]) for leak in found["test_last"]["leaks"]] == [
        ("module fixture bag", "test_fixtures.py: KEPT[1][0]")
    ]
    suite.result.assert_outcomes(passed=2, failed=2)


@pytest.mark.slow
def test_a_failed_test_is_its_own_failure(suite: Suite) -> None:
    suite.write(
        "test_failed.py",
        IMPORTS
        + """
NET = torch.nn.Linear(600, 600)

def test_fails():
    KEPT.append(torch.zeros(1 << 19))
    NET(torch.ones(1, 600)).sum().backward()
    assert 0

@pytest.mark.xfail
def test_xfails():
    batch = torch.zeros(1 << 19)
    assert 0

def test_good(): pass
""",
    )

    assert suite.leaks() == {}
    suite.result.assert_outcomes(passed=1, failed=1, xfailed=1)
    assert suite.data["judged"] == 1


@pytest.mark.slow
def test_marks_allow_and_limit(suite: Suite) -> None:
    suite.write(
        "test_marks.py",
        IMPORTS
        + """
@pytest.mark.gpu_memory(peak="4MiB")
def test_above():
    first = torch.zeros(1 << 20)
    del first
    second = [torch.zeros(1 << 19) for _ in range(3)]

@pytest.mark.gpu_memory(peak="4MiB")
def test_within(batch):
    for _ in range(3):
        first = torch.zeros(1 << 19)
        del first

@pytest.fixture
def batch():
    return torch.zeros(1 << 18)

@pytest.mark.gpu_memory(keeps="3MiB")
def test_keeps():
    KEPT.append(torch.zeros(1 << 19))
""",
    )

    found = suite.leaks()

    assert {name: (test["peak"], test["limit"]) for name, test in found.items()} == {
        "test_above": (6 << 20, 4 << 20),
        "test_within": (3 << 20, 4 << 20),
    }
    suite.result.assert_outcomes(passed=2, failed=1)


@pytest.mark.parametrize(
    ("options", "source", "said"),
    [
        (("--gpu-leaks-min", "much"), "", "--gpu-leaks-min: 'much' is not a size"),
        (("--gpu-leaks-min", "5"), "", "--gpu-leaks-min: 5 has no unit"),
        ((), "@pytest.mark.gpu_memory(peak='big')", "gpu_memory(peak=): 'big' is not a size"),
        ((), "@pytest.mark.gpu_memory(peak=7)", "gpu_memory(peak=): int is not a size"),
        ((), "@pytest.mark.gpu_memory('2GiB')", "gpu_memory takes peak= and keeps="),
    ],
)
def test_wrong_sizes_are_errors_of_usage_in_one_line(suite: Suite, options: tuple[str, ...], source: str, said: str) -> None:
    suite.write("conftest.py", "")
    suite.write("test_one.py", f"import pytest\n{source}\ndef test_one(): pass\n")

    suite.run("--gpu-leaks", *options)

    errors = suite.result.stderr.str() + suite.text
    assert suite.result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in errors
    assert "Traceback" not in errors


LEAKS = IMPORTS + "\ndef test_leaks():\n    KEPT.append(torch.zeros(1 << 19))\n\ndef test_good(): pass\n"


@pytest.mark.slow
def test_xdist_junit_and_github_have_the_same(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    suite.write("test_leaks.py", LEAKS)

    found = suite.leaks("-n", "1", "--junitxml", "junit.xml", "--gpu-leaks-lines")

    (leak,) = found["test_leaks"]["leaks"]
    assert leak["line"].startswith("test_leaks.py:5")
    case = ElementTree.parse(suite.folder / "junit.xml").find(".//testcase[@name='test_leaks']")
    assert case is not None
    properties = {each.get("name"): each.get("value") for each in case.iter("property")}
    assert properties["gpu_leaks_bytes"] == str(2 << 20)
    assert "test_leaks.py: KEPT[0]" in properties["gpu_leak"]
    assert any("test_leaks.py: KEPT[0]" in (each.text or "") for each in case if each.tag != "properties")
    annotations = re.findall(r"::error file=(\S+),line=(\d+),title=GPU memory::(.*)", suite.text)
    assert [(file, line) for file, line, _ in annotations] == [("test_leaks.py", "4")] * 2
    assert "KEPT[0]" in annotations[1][2]
    suite.result.assert_outcomes(passed=1, failed=1)


@pytest.mark.slow
def test_the_json_is_of_its_schema(suite: Suite) -> None:
    suite.write("test_leaks.py", LEAKS)
    suite.leaks()

    schema = json.loads((Path(nbguard.__file__).parent / "schemas" / "gpu_leaks.json").read_text(encoding="utf-8"))
    jsonschema.validate(suite.data, schema)


def test_unless_asked_it_is_off_and_imports_nothing(suite: Suite) -> None:
    suite.write("conftest.py", "")
    suite.write(
        "test_off.py",
        "import sys\n"
        "def test_off():\n"
        "    loaded = {name for name in sys.modules if name.startswith('nbguard.')}\n"
        f"    assert loaded == {{'nbguard.frontend', 'nbguard.frontend.gpu_leaks', {planted.PLUGIN!r}}}\n"
        "    assert 'torch' not in sys.modules\n",
    )

    suite.run().assert_outcomes(passed=1)
    assert "gpu leaks" not in suite.text


def test_without_pytorch_there_is_nothing_to_judge(suite: Suite) -> None:
    suite.write("conftest.py", "")
    suite.write("test_plain.py", "import sys\ndef test_plain():\n    assert 'torch' not in sys.modules\n")

    assert suite.leaks() == {}
    assert suite.data["tracked"] == ""
    suite.result.assert_outcomes(passed=1)


@pytest.mark.slow
def test_attributes_of_a_test_class_are_pytest_s(suite: Suite) -> None:
    suite.write(
        "test_class.py",
        IMPORTS + "\nclass TestIt:\n    def test_one(self):\n        self.batch = torch.zeros(1 << 19)\n",
    )

    found = suite.leaks()

    assert found["TestIt::test_one"]["kept_by_pytest"] == 2 << 20
    suite.result.assert_outcomes(passed=1)


@pytest.mark.slow
def test_classes_that_a_test_makes_are_not_kept(suite: Suite) -> None:
    """As a mock does, whose class is its own and leads to the arguments of its calls."""
    suite.write(
        "test_classes.py",
        IMPORTS
        + """
from unittest.mock import MagicMock

@pytest.mark.parametrize("n", range(3))
def test_mock(n):
    called = MagicMock()
    called(torch.ones(1 << 20))

def test_class():
    class Model(torch.nn.Module):
        cache = [torch.ones(1 << 20)]
    Model()
""",
    )

    assert [test["leaks"] for test in suite.leaks().values() if test["leaks"]] == [], suite.text
    suite.result.assert_outcomes(passed=4)


def test_a_failure_of_its_own_ends_the_watch_and_no_test(suite: Suite) -> None:
    suite.write(
        "conftest.py",
        planted.CONFTEST
        + "from nbguard.frontend.gpu_leaks.births import TensorBirths\n"
        + "def broken(*_): raise RuntimeError('broken')\n"
        + "TensorBirths.left = broken\n",
    )
    suite.write("test_leaks.py", LEAKS)

    assert suite.leaks() == {}
    suite.result.assert_outcomes(passed=2)
    assert "RuntimeError: broken" in suite.data["problem"]


def test_the_plugin_s_point_of_entry_is_in_the_project() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")

    assert "[project.entry-points.pytest11]" in text
    assert f'nbguard = "{planted.PLUGIN}"' in text
