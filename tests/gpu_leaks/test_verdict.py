"""What is judged, said and compared, by facts that are made: no test is run."""

from __future__ import annotations

import pytest

from nbguard.errors import NbguardError
from nbguard.frontend.gpu_leaks.results import GpuLeaks, HeldMemory, MemoryOfTest
from nbguard.frontend.gpu_leaks.summary import comment_on, read_result
from nbguard.frontend.gpu_leaks.verdict import judge
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import Facts
from nbguard.plain_data import to_json
from nbguard.testing import make_graph

MIB = 1 << 20


def analysis() -> Analysis:
    graph = make_graph(
        roots={"module fixture net": ["net"], "CACHE": ["cache"]},
        edges={"net": {".weight": "weight"}, "cache": {"[0]": "kept", "[1]": "weight"}},
        storages={"weight": 4 * MIB, "kept": 2 * MIB},
    )
    return Analysis(Facts(tracked="cuda", graph=graph))


def test_what_a_living_fixture_holds_is_no_leak() -> None:
    made = analysis()
    left = {storage.key: storage.nbytes for storage in made.facts.graph.storages}

    verdict = judge(made, left, ("module fixture net",), {}, {})

    assert [(leak.holder, leak.nbytes, leak.storages) for leak in verdict.leaks] == [("CACHE[0]", 2 * MIB, 1)]
    assert {label: len(keys) for label, keys in verdict.excused.items()} == {"module fixture net": 1}


def test_a_fixture_that_has_ended_is_named_with_the_line() -> None:
    made = analysis()
    left = {storage.key: storage.nbytes for storage in made.facts.graph.storages if storage.nbytes == 2 * MIB}

    (leak,) = judge(made, left, (), {}, dict.fromkeys(left, "test_x.py:3 in net()"), "module fixture net").leaks

    assert (leak.fixture, leak.line) == ("module fixture net", "test_x.py:3 in net()")
    assert leak.sentence == "CACHE[0] holds 2 MiB in 1 storage, left by module fixture net, allocated by test_x.py:3 in net()"


def of_test(name: str, nbytes: int = 0, peak: int | None = None) -> MemoryOfTest:
    leaks = (HeldMemory(holder="test_x.py: CACHE[0]", nbytes=nbytes, storages=1),) if nbytes else ()
    return MemoryOfTest(test=name, file="test_x.py", line=3, leaks=leaks, peak=peak)


def run_of(*tests: MemoryOfTest) -> GpuLeaks:
    return GpuLeaks(tracked="cpu", minimum=MIB, judged=9, tests=tests)


def test_a_comment_has_the_tests_that_changed_the_worst_first() -> None:
    base = run_of(of_test("same", 2 * MIB), of_test("mended", 3 * MIB), of_test("peak", peak=5 * MIB))
    here = run_of(of_test("same", 2 * MIB), of_test("new | one", 8 * MIB), of_test("peak", peak=7 * MIB))

    lines = comment_on(here, base).splitlines()

    assert lines[0] == "### GPU memory of tests: 10 MiB left behind (+5 MiB since the base branch)"
    assert lines[4:] == [
        "| `new ¦ one` | 8 MiB |  |  |  | `test_x.py: CACHE[0]` |",
        "| `peak` |  |  | 7 MiB | 5 MiB |  |",
        "| `mended` |  | 3 MiB |  |  |  |",
    ]


def test_a_comment_without_a_base_and_without_changes() -> None:
    assert comment_on(run_of(), None).splitlines()[2] == "No test left anything."
    assert comment_on(run_of(of_test("same", MIB)), run_of(of_test("same", MIB))).splitlines()[2] == "No test changed."


def test_a_file_is_read_as_it_was_written() -> None:
    result = run_of(of_test("one", 2 * MIB, peak=3 * MIB))

    assert read_result(to_json(result.to_data()).encode(), "base.json") == result


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"kind": "report"}', b'{"kind": "gpu_leaks", "tests": 3}', b"\xff"])
def test_another_file_is_refused_in_one_line(text: bytes) -> None:
    with pytest.raises(NbguardError, match=r"^base\.json cannot be used: "):
        read_result(text, "base.json")


def test_the_summary_says_what_there_was() -> None:
    result = run_of(
        of_test("leaky", 2 * MIB), MemoryOfTest(test="odd", file="f.py", line=1, collected=5 * MIB, kept_by_pytest=3 * MIB)
    )

    text = str(result)

    assert "1 test of 9 left 2 MiB behind (CPU tensors, as there is no GPU)" in text
    assert "test_x.py: CACHE[0]" in text
    assert "5 MiB (odd)" in text
    assert "3 MiB are attributes" in text


@pytest.mark.parametrize(("tracked", "reason"), [("", "with PyTorch imported"), ("cpu", "without an error")])
def test_a_run_that_judged_nothing_says_why(tracked: str, reason: str) -> None:
    """The tests could not be imported, or all failed."""
    text = str(GpuLeaks(tracked=tracked, minimum=1, judged=0, tests=()))

    assert "no test was judged" in text
    assert reason in text
