"""A profile as a value: saved, read back, analysed again, refused in one line; reports rebuilt from recorded files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from array import array
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nbguard.errors import NbguardError, ProfileFileError
from nbguard.frontend.cli import main
from nbguard.frontend.notebook.profile import profile_fit
from nbguard.memory.core.facts import Unavailable
from nbguard.plain_data import Within
from nbguard.render.text import blocks_text
from nbguard.training.profiler.analysis.fit_report import build_fit_report
from nbguard.training.profiler.analysis.memory_growth import MemoryObservations
from nbguard.training.profiler.analysis.observations import FitObservations
from nbguard.training.profiler.analysis.time.batches import divide
from nbguard.training.profiler.analysis.time.phase_log import Boundary, BoundaryKind, PhaseLog
from nbguard.training.profiler.checks import CHECKS
from nbguard.training.profiler.checks.amp import AmpWatch
from nbguard.training.profiler.profile import FitProfile, forget
from nbguard.training.runs.analysis.record import RunCell, RunRecord
from tests.profiler.loops import Fails, learner, quiet_fit, torch_loader, train
from tests.profiler.record_profiles import FITS, FOLDER


def profiled(fit: Callable[[], Any], **options: Any) -> FitProfile:
    with profile_fit(show=False, **options) as profile:
        fit()
    return profile


def nan_in_batch(number: int) -> Callable[[torch.Tensor], None]:
    batches = iter(range(1, 1000))

    def spoil(_: torch.Tensor) -> None:
        if next(batches) == number:
            torch.full((), math.nan, requires_grad=True).backward()  # type: ignore[no-untyped-call]

    return spoil


LIVE: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "fastai": (lambda: quiet_fit(learner()), {}),
    "loop, two batches recorded": (lambda: train(2, loader=torch_loader(count=160)), {"memory": True}),
    "NaN": (lambda: train(3, each=nan_in_batch(7)), {}),
    "workers tried": (lambda: train(1, loader=torch_loader(workers=1)), {"tune_workers": True}),
    "compared": (train, {"compare": True}),
    "no fit": (lambda: None, {}),
}


@pytest.mark.parametrize("name", LIVE)
def test_the_report_is_the_same_after_the_way_through_json(name: str) -> None:
    fit, options = LIVE[name]
    forget()
    if "compare" in options:
        profiled(fit, **options)

    profile = profiled(fit, **options)
    read = FitObservations.from_json(profile.observations.to_json())

    assert read == profile.observations
    assert build_fit_report(read) == build_fit_report(profile.observations) == profile.report


def test_a_fit_that_failed_is_saved_as_far_as_it_came(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"

    with pytest.raises(ZeroDivisionError), profile_fit(show=False, save=str(path)) as profile:
        quiet_fit(learner(Fails()))

    report = build_fit_report(FitObservations.from_json(path.read_text()))
    assert (report.ending, report.error, report.timing.batches) == ("error", "ZeroDivisionError", 8)
    assert replace(report, files=(str(path),)) == profile.report


def test_where_it_cannot_be_saved_is_said_before_the_fit() -> None:
    with pytest.raises(NbguardError, match="there is no folder"), profile_fit(show=False, save="nowhere/fit.json"):
        pytest.fail("the fit would have run")


def test_there_are_no_observations_before_the_end() -> None:
    with profile_fit(show=False) as profile, pytest.raises(NbguardError, match="still running"):
        _ = profile.observations


def test_an_instrument_that_cannot_be_read_costs_its_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: AmpWatch) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(AmpWatch, "observe", fails)
    report = profiled(train).report

    assert report.timing.batches == 16
    assert report.notes == (
        "AmpWatch could not observe (ZeroDivisionError: planted): scales of mixed precision not seen; please report it",
    )


def numbers(least: int = -(2**40), most: int = 2**40) -> st.SearchStrategy[int]:
    return st.integers(least, most)


@st.composite
def logs(draw: st.DrawFn) -> PhaseLog:
    """Logs as a recorder writes them: times that never go back, boundaries in their order."""
    labels = tuple(draw(st.lists(st.text(max_size=12), min_size=1, max_size=5)))
    codes = draw(st.lists(st.integers(0, len(labels) - 1), max_size=12))
    start = draw(numbers())
    times = list(accumulate(draw(st.lists(numbers(0), min_size=len(codes), max_size=len(codes))), initial=start))[1:]
    kinds = st.sampled_from(["batch", "end", "loss", "step", "fit", "disturbed"])
    places = sorted(draw(st.lists(st.integers(0, len(codes)), max_size=8)))
    boundaries = tuple(Boundary(at, draw(kinds), draw(st.integers(0, 3))) for at in places)  # type: ignore[arg-type]
    return PhaseLog(start=start, codes=array("H", codes), times=array("q", times), labels=labels, boundaries=boundaries)


def within_bounds(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Objects of a class whose numbers keep to the bounds that their annotations give."""

    def values(hint: Any) -> st.SearchStrategy[Any]:
        bounds = next((each for each in getattr(hint, "__metadata__", ()) if type(each) is Within), None)
        if bounds is None:
            return st.from_type(hint)
        if hint.__origin__ is float:
            return st.floats(bounds.least, math.nextafter(bounds.most, 0))
        return st.integers(bounds.least, bounds.most)

    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{field.name: values(hints[field.name]) for field in fields(cls)})


st.register_type_strategy(PhaseLog, logs())
for cls in (RunCell, RunRecord):
    st.register_type_strategy(cls, lambda cls: within_bounds(cls))
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(int, numbers())
st.register_type_strategy(str, st.text(max_size=12))

CHECKED = st.fixed_dictionaries({}, optional={check.name: st.from_type(check.facts) for check in CHECKS})


def observed() -> st.SearchStrategy[FitObservations]:
    """Return observations with facts of any of the checks, whose types only `CHECKS` names."""
    return st.builds(FitObservations, checks=CHECKED)


st.register_type_strategy(FitObservations, observed())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.from_type(FitObservations))
def test_any_observations_come_back_as_they_were(observations: FitObservations) -> None:
    text = observations.to_json()

    assert "\n" not in text
    assert FitObservations.from_json(text) == observations
    assert FitObservations.from_json(text.encode()).to_json() == text


@settings(max_examples=60, deadline=None)
@given(logs())
def test_a_log_is_divided_alike_after_the_way_through_json(log: PhaseLog) -> None:
    observations = FitObservations(log=log, memory=Unavailable("memory", "not followed"))

    read = FitObservations.from_json(observations.to_json()).log

    assert divide(read) == divide(log)
    assert sum(sum(batch.times.values()) for batch in divide(read).batches) + sum(divide(read).outside.values()) == log.wall


def saved() -> dict[str, Any]:
    data: dict[str, Any] = json.loads((FOLDER / "fastai.json").read_text())
    return data


def changed(*path: str, to: Any) -> str:
    """Return the recorded file with one field changed, or without it if `to` is `...`."""
    data = saved()
    inner = data
    for name in path[:-1]:
        inner = inner[name]
    if to is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return json.dumps(data)


REFUSED = {
    "no JSON": (lambda: "{", "it holds no JSON"),
    "deep": (lambda: "[" * 200_000, "it holds no JSON"),
    "something else": (lambda: json.dumps({"schema": 1, "kind": "fit_report"}), "it holds something else"),
    "a list": (lambda: "[]", "it holds something else"),
    "another version": (lambda: changed("version", to=3), "(its format is 3, this version reads 2)"),
    "no version": (lambda: changed("version", to=...), "(its format is None, this version reads 2)"),
    "an unknown field": (lambda: changed("subject", "colour", to=1), "a field 'subject.colour' that this version"),
    "a field too few": (lambda: changed("log", to=...), "its field 'log' is missing"),
    "another type": (lambda: changed("cores", to="two"), "its field 'cores' should be int, and is a value of type str"),
    "a truth for a number": (lambda: changed("cores", to=True), "its field 'cores' should be int"),
    "nothing": (lambda: changed("finite", to=None), "its field 'finite' should be an object, and is nothing"),
    "another word": (lambda: changed("ending", to="well"), "its field 'ending' should be one of complete, error"),
    "an unknown column": (lambda: changed("loaders", "columns", to=["x"] * 15), "its field 'loaders[0]' should be a row"),
    "a row too short": (lambda: changed("loaders", "rows", to=[[1]]), "its field 'loaders[0]' should be a row of"),
    "a log that is cut": (lambda: changed("log", "times", to="eJw="), "its log of phases ('log') is damaged"),
    "a log of another length": (lambda: changed("log", "marks", to=3), "its log of phases ('log') is damaged"),
    "a log that would fill memory": (lambda: changed("log", "marks", to=10**12), "its log of phases ('log') is damaged"),
    "a phase without a name": (lambda: changed("log", "labels", to=[]), "its log of phases ('log') is damaged"),
    "a log with more in it": (lambda: changed("log", "more", to=1), "its log of phases ('log') is damaged"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, message = REFUSED[name]
    (tmp_path / "fit.json").write_text(make())

    with pytest.raises(ProfileFileError) as refused:
        FitObservations.from_json(make())
    status = main(["profile", str(tmp_path / "fit.json")])

    assert message in str(refused.value)
    assert status == 2
    error = capsys.readouterr().err
    assert error == f"nbguard: {tmp_path / 'fit.json'} cannot be read: {refused.value}\n"


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "nowhere.json", str(tmp_path)]) == 2

    missing, folder = capsys.readouterr().err.splitlines()
    assert missing == "nbguard: nowhere.json cannot be read: there is no such file"
    assert folder.startswith(f"nbguard: {tmp_path} cannot be read: ")


@pytest.mark.parametrize("name", FITS)
def test_the_report_of_a_recorded_fit_is_rebuilt(name: str, request: pytest.FixtureRequest) -> None:
    report = build_fit_report(FitObservations.from_json((FOLDER / f"{name}.json").read_text()))
    texts = {".txt": blocks_text(report.blocks()) + "\n", ".report.json": json.dumps(report.to_data(), indent=1) + "\n"}
    if request.config.getoption("--update-golden"):
        for ending, text in texts.items():
            (FOLDER / f"{name}{ending}").write_text(text, encoding="utf-8")

    assert texts == {ending: (FOLDER / f"{name}{ending}").read_text(encoding="utf-8") for ending in texts}
    assert sum(row.total for row in report.timing.rows) == report.timing.wall


def test_recorded_fits_have_what_was_planted() -> None:
    loop = FitObservations.from_json((FOLDER / "loop.json").read_text())
    report = build_fit_report(loop)

    assert {"graph", "nan", "sync"} <= {finding.kind for finding in report.findings}
    assert isinstance(loop.memory, MemoryObservations)
    assert loop.memory.recorded is not None
    assert report.comparison is not None
    assert all(path.stat().st_size < 200_000 for path in FOLDER.iterdir())


_WITHOUT_LIBRARIES = """
import sys
for name in ("torch", "fastai", "numpy", "IPython", "psutil", "pynvml"):
    sys.modules[name] = None
from nbguard.frontend.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_saved_profile_is_shown_where_there_is_no_torch() -> None:
    paths = [str(FOLDER / f"{name}.json") for name in FITS]
    command = [sys.executable, "-c", _WITHOUT_LIBRARIES, "profile", *paths]

    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout.splitlines()

    assert text == "".join((FOLDER / f"{name}.txt").read_text() for name in FITS)
    assert [json.loads(line) for line in lines] == [json.loads((FOLDER / f"{name}.report.json").read_text()) for name in FITS]


def test_all_kinds_of_boundaries_can_be_saved() -> None:
    kinds: tuple[BoundaryKind, ...] = ("batch", "end", "loss", "step", "fit", "disturbed")
    log = PhaseLog(start=5, codes=array("H"), times=array("q"), labels=(), boundaries=tuple(Boundary(0, k, 1) for k in kinds))
    observations = FitObservations(log=log, memory=Unavailable("memory", "x"))

    assert FitObservations.from_json(observations.to_json()).log == log
