"""What a profile writes and keeps: whole files, and the last runs of cells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbguard.errors import NbguardError
from nbguard.files import check_path
from nbguard.training.profiler import profile as kept
from nbguard.training.profiler.analysis.compare import FitSamples
from nbguard.training.profiler.files import write_json, write_text


def test_json_is_written_whole_and_nothing_else(tmp_path: Path) -> None:
    path = write_json(tmp_path / "fit.json", {"step": [1, None], "name": "µ"})

    assert json.loads(path.read_text(encoding="utf-8")) == {"step": [1, None], "name": "µ"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_permissions_and_a_link_leads_on(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    write_text(tmp_path / "link", "new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640


def test_what_was_there_stays_where_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    path.write_text("old")

    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, float("nan"))

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(NbguardError, match=r"fit\.json: File too large; name another file"):
            write_text(tmp_path / "fit.json", "x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_said_before(tmp_path: Path) -> None:
    with pytest.raises(NbguardError, match=r"there is no folder .*none; make it"):
        check_path(tmp_path / "none" / "fit.json")
    with pytest.raises(NbguardError, match="it is a folder"):
        check_path(tmp_path)


@pytest.fixture
def _no_runs() -> Iterator[None]:
    kept.forget()
    yield
    kept.forget()


def _run(title: str) -> FitSamples:
    return FitSamples(title=title, batches=1, steps=(1,))


@pytest.mark.usefixtures("_no_runs")
def test_the_last_run_of_a_cell_is_kept() -> None:
    assert kept.last("fit()") is None
    kept.keep("fit()", _run("first"))
    kept.keep("fit()", _run("second"))
    kept.keep("other()", _run("other"))

    found, edited = kept.last("fit()"), kept.last("fit(edited)")

    assert found is not None
    assert found.title == "second"
    assert edited is not None
    assert edited.title == "other"


@pytest.mark.usefixtures("_no_runs")
def test_only_so_many_runs_are_kept() -> None:
    for number in range(30):
        kept.keep(str(number), _run(str(number)))

    titles = [found.title for number in range(30) if (found := kept.last(str(number)))]

    assert titles[:10] == ["29"] * 10  # their own are gone
    assert titles[10:] == [str(number) for number in range(10, 30)]
