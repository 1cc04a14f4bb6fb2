"""Importing and loading nbguard is light, and changes nothing for who only imports it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

_HEAVY = ("torch", "fastai", "matplotlib", "pynvml", "numpy", "pandas", "ipywidgets", "psutil")


def _modules_after(code: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_import_loads_no_library() -> None:
    loaded = _modules_after("import nbguard; nbguard.__version__")

    assert loaded.isdisjoint({*_HEAVY, "IPython"})


def test_load_ext_loads_no_library() -> None:
    loaded = _modules_after(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "InteractiveShell.instance().run_line_magic('load_ext', 'nbguard')"
    )

    assert "nbguard.frontend.notebook.magics.gpumem" in loaded
    assert loaded.isdisjoint(_HEAVY)
    assert not any(name.startswith("nbguard.memory.scan") for name in loaded)


def test_it_loads_in_a_browser_where_python_has_no_clock_of_a_thread() -> None:
    loaded = _modules_after(
        "import time\n"
        "del time.thread_time, time.thread_time_ns\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "InteractiveShell.instance().run_line_magic('load_ext', 'nbguard')\n"
        "import nbguard; nbguard.snapshot_report"
    )

    assert "nbguard.memory.snapshots.report" in loaded


@pytest.mark.parametrize(("cell", "package"), [("%%profile_fit\\n1", "torch"), ("%nbguard doctor", "psutil")])
def test_what_needs_a_package_that_is_not_there_says_so(cell: str, package: str) -> None:
    """A browser has neither PyTorch nor psutil."""
    code = (
        "import sys, time\n"
        "del time.thread_time, time.thread_time_ns\n"
        "sys.modules |= {'psutil': None, 'torch': None}\n"
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'nbguard')\n"
        f"shell.run_cell('{cell}')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stderr.endswith(f": {package} is not installed here, and this needs it\n")


def test_public_names_are_there() -> None:
    pytest.importorskip("torch")
    import nbguard

    assert all(getattr(nbguard, name) is not None for name in nbguard.__all__)
    assert set(nbguard.__all__) <= set(dir(nbguard))


def test_a_profile_is_imported_while_its_clock_runs() -> None:
    loaded = _modules_after(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'nbguard')\n"
        "from nbguard.frontend.notebook.session import Session\n"
        "Session.profile = lambda *_, **__: None  # the clock begins there\n"
        "shell.run_line_magic('profile_fit', '')"
    )

    assert {name for name in loaded if name.startswith("nbguard.training.profiler.")} == {"nbguard.training.profiler.options"}


_WRONG = [
    "gpumem bogus",
    "gpumem why",
    "gpumem -n 0",
    "reset_gpu --bogus",
    "reset_gpu --park",
    "nbguard bogus",
    "profile_fit --save",
]
_WRONG_NAMES = ["gpumem predict nothing --gpu T4", "reset_gpu nothing", "nbguard doctor nothing", "nbguard fix export"]


@pytest.mark.parametrize(("lines", "light"), [(_WRONG, True), (_WRONG_NAMES, False)], ids=["lines", "names"])
def test_a_wrong_line_is_told_without_what_it_would_have_needed(lines: list[str], light: bool) -> None:
    loaded = _modules_after(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from IPython.core.error import UsageError\n"
        "shell = InteractiveShell.instance()\n"
        "shell.run_line_magic('load_ext', 'nbguard')\n"
        f"for line in {lines}:\n"
        "    try: shell.run_line_magic(*line.split(None, 1))\n"
        "    except UsageError: continue\n"
        "    raise SystemExit(line)"
    )

    assert "torch" not in loaded
    assert not (light and any(name.startswith("nbguard.memory.scan") for name in loaded))
