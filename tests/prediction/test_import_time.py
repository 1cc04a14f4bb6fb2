"""The time of first imports is told apart from that of a prediction, and is no longer than it must be."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from nbguard.training.prediction.predict import import_time


def test_only_imports_that_load_a_module_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_once.py").write_text("import json\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    former = importlib._bootstrap._find_and_load  # type: ignore[attr-defined]

    with import_time() as first:
        import imported_once  # type: ignore[import-not-found]
    with import_time() as second:
        import imported_once  # noqa: F401

    assert first.seconds > 0
    assert second.seconds == 0
    assert importlib._bootstrap._find_and_load is former  # type: ignore[attr-defined]


def test_an_import_that_fails_leaves_imports_as_they_were() -> None:
    former = importlib._bootstrap._find_and_load  # type: ignore[attr-defined]
    with pytest.raises(ImportError), import_time():
        import no_such_module_of_anybody  # type: ignore[import-not-found] # noqa: F401
    assert importlib._bootstrap._find_and_load is former  # type: ignore[attr-defined]


@pytest.mark.usefixtures("torch_process")
@pytest.mark.parametrize(
    "code",
    [
        "import nbguard.training.prediction.script",
        'import nbguard, torch\nwith nbguard.simulate("T4"): torch.nn.Linear(2, 2)(torch.ones(1, 2))',
    ],
    ids=["prediction", "simulation"],
)
def test_no_mode_of_ours_imports_the_compiler(code: str) -> None:
    subprocess.run([sys.executable, "-c", f"{code}\nimport sys; assert 'torch._dynamo' not in sys.modules"], check=True)
