"""The corpus of planted problems and healthy fits: the first sentence names the cause, and nothing where there is none.

Fits run in notebooks of other processes, one for each framework, all forked from one that has imported PyTorch.
`python -m tests.profiler.corpus.run` shows all that is said.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.kernels import Zygote
from tests.profiler.corpus.cases import FRAMEWORKS, NEEDS, NONFINITE, Case, cases_of
from tests.thorough import THOROUGH, spread

pytestmark = pytest.mark.usefixtures("torch_process")

REPOSITORY = Path(__file__).parents[2]


def said_of(
    zygote: Zygote, framework: str, cases: Iterable[Case], path: str = "", option: str = ""
) -> dict[str, tuple[str, str]]:
    """Run cases in one process; return the verdict and the first sentence of each.

    `path`: a folder to import from first. `option`: of the profiles.
    """
    names = [case.name for case in cases]
    arguments = ["--json", *filter(None, (option,)), *(f"{framework}:={name}" for name in names)]
    program = f"""
import sys
sys.path[:0], sys.argv[1:] = {[*filter(None, (path,)), str(REPOSITORY)]!r}, {arguments!r}
from tests.profiler.corpus.run import main
main(sys.argv[1:])
"""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = zygote.run(program, {"IPYTHONDIR": folder}, 3600 if THOROUGH else 280)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"framework"')]
    assert len(lines) == len(names), out + errors
    return {line["name"]: (line["verdict"], line["first"][0]) for line in lines}


@pytest.mark.slow
def test_a_fastai_from_a_checkout_is_a_library_there_too(torch_zygote: Zygote, tmp_path: Path) -> None:
    """As its developers have it: `pip install -e`, or a folder of PYTHONPATH."""
    fastai = Path(str(importlib.util.find_spec("fastai").origin)).parent  # type: ignore[union-attr]
    (tmp_path / "fastai").symlink_to(fastai)
    (case,) = [case for case in cases_of("fastai")[1] if case.name == "a slow hook by fastai's HookCallback"]

    assert said_of(torch_zygote, "fastai", [case], str(tmp_path))[case.name][0] == "named"


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_first_sentences(torch_zygote: Zygote, framework: str) -> None:
    """In one test, as all cases are run by one process. Those known not to be named are tried in a thorough run."""
    if importlib.util.find_spec(NEEDS[framework]) is None:
        pytest.skip(f"{NEEDS[framework]} is not installed here")
    cases = [case for case in spread(cases_of(framework)[1], 8) if THOROUGH or not case.misses]
    said = said_of(torch_zygote, framework, cases)

    wrong = {name: sentence for name, (verdict, sentence) in said.items() if verdict not in ("named", "healthy")}
    assert wrong.keys() == {case.name for case in cases if case.misses}, wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", ["", pytest.param("--stop-on-nan", marks=pytest.mark.skipif(not THOROUGH, reason="it takes another process"))]
)
def test_a_value_that_is_not_finite_is_laid_to_its_operation_and_line(torch_zygote: Zygote, option: str) -> None:
    every = cases_of(NONFINITE)[1]
    cases = [case for case in spread(every, 8) if all(map(importlib.util.find_spec, case.imports))]
    said = said_of(torch_zygote, NONFINITE, cases, option=option)

    wrong = {case.name: said[case.name][1] for case in cases if said[case.name][0] != "named"}
    known = {case.name for case in cases if case.misses}
    if option:
        assert len(wrong) <= len(cases) * 0.05, wrong
    else:
        assert wrong.keys() == known, wrong
        assert sum(bool(case.misses) for case in every) <= len(every) * 0.06
    for sentence in wrong.values():  # a line is right or left out
        assert not re.search(r", line \d", sentence), sentence


def test_each_case_has_a_name_of_its_own_and_the_corpus_is_large_enough() -> None:
    cases = [case for framework in FRAMEWORKS for case in cases_of(framework)[1]]

    assert len({(case.framework, case.name) for case in cases}) == len(cases)
    assert sum(not case.is_healthy for case in cases) >= 100
    assert sum(case.is_healthy for case in cases) >= 40
    assert sum(bool(case.misses) for case in cases) <= 15
