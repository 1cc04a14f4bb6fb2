"""A diagnosis as a value and as it is shown."""

from __future__ import annotations

from nbguard.doctor.analysis.diagnosis import CheckFinding, Diagnosis, checked, not_checked

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
Linear: 1 problem · 1 not checked · 1 in order · 0.25 s

  problem      a <b>problem</b>
               3 of 4
               → first()
               → second()
  note         a note
               1 of 2

environment
  problem  limits   9 open files
  ok       threads  2 threads

export
  not checked  ONNX  onnxscript is not installed"""


def test_the_gravest_finding_comes_first_and_gives_the_check_its_state() -> None:
    assert _DIAGNOSIS.findings == (_PROBLEM, _NOTE)
    assert _DIAGNOSIS.worst == "problem"
    assert [check.state for check in _DIAGNOSIS.checks] == ["problem", "ok", "not checked"]


def test_text() -> None:
    assert _DIAGNOSIS.mimebundle()["text/plain"] == TEXT


def test_html_escapes() -> None:
    html = _DIAGNOSIS.mimebundle()["text/html"]

    assert "&lt;b&gt;problem" in html
    assert "<code>first()</code>" in html
