"""A diagnosis as a value and as it is shown."""

from __future__ import annotations

from nbguard.training.doctor.analysis.diagnosis import CheckFinding, Diagnosis, checked, not_checked

_NOTE = CheckFinding(severity="note", what="a note", evidence="1 of 2", command="")
_PROBLEM = CheckFinding(severity="problem", what="a <b>problem</b>", evidence="3 of 4", command="first()\nsecond()")
_DIAGNOSIS = Diagnosis(
    subject="Linear",
    checks=(
        checked("environment", "limits", "9 open files", _NOTE, _PROBLEM),
        checked("environment", "threads", "2 threads"),
        not_checked("export", "ONNX", "onnxscript is not installed"),
    ),
    seconds=0.25,
)

TEXT = """\
Linear: 1 problem, 1 note

  problem      a <b>problem</b>
               3 of 4
               → first()
               → second()
  note         a note
               1 of 2

  in order     threads
  not checked  ONNX: onnxscript is not installed

3 checks in 0.25 s; --all shows their figures"""


def test_the_gravest_finding_comes_first_and_gives_the_check_its_state() -> None:
    assert _DIAGNOSIS.findings == (_PROBLEM, _NOTE)
    assert _DIAGNOSIS.worst == "problem"
    assert [check.state for check in _DIAGNOSIS.checks] == ["problem", "ok", "not checked"]


def test_text() -> None:
    assert _DIAGNOSIS.mimebundle()["text/plain"] == TEXT


def test_each_check_with_its_figures_on_request() -> None:
    text = _DIAGNOSIS.mimebundle(whole=True)["text/plain"]

    assert all(check.evidence in text for check in _DIAGNOSIS.checks)


def test_a_machine_without_a_gpu_and_without_problems_is_called_so_in_the_first_line() -> None:
    fine = Diagnosis(subject="", checks=(checked("environment", "threads", "2 threads"),), has_gpu=False)

    assert str(fine).splitlines()[0] == "No problem found on this machine; it has no NVIDIA GPU"


def test_html_escapes() -> None:
    html = _DIAGNOSIS.mimebundle()["text/html"]

    assert "&lt;b&gt;problem" in html
    assert "<code>first()</code>" in html
