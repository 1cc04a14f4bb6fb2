"""The board for Grafana: its queries find what is written, also in a real Prometheus where one is installed."""

from __future__ import annotations

import functools
import http.server
import json
import re
import shutil
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbguard.frontend.notebook.listeners.memory_log import cell_figures, reading_figures
from nbguard.memory.core.facts import Block, Counted, DeviceFacts, Reading, Segment
from nbguard.memory.reports.cell_ledger import CellRecord, DeviceChange, Share
from nbguard.training.profiler.analysis.compare import figures
from nbguard.training.profiler.analysis.report import FitReport
from nbguard.training.profiler.sinks import open_sink
from tests.kernels import wait_until
from tests.profiler.fit_reports import rich
from tests.ui.servers import free_port

DOCS = Path(__file__).parents[2] / "docs"
BOARD = json.loads((DOCS / "guide" / "grafana.json").read_text(encoding="utf-8"))
PAGE = (DOCS / "guide" / "dashboards.md").read_text(encoding="utf-8")
NOTEBOOKS = ("/a/one.ipynb", "/a/two.ipynb")
SELECTOR = re.compile(r'(nbguard_\w+)\{notebook=~"\$notebook"(?:, of="([^"]+)")?\}')


def _fit() -> FitReport:
    """A fit of two ranks, the first of which waits for the second 6 ms, with 3 of 40 steps skipped."""
    report = rich()
    assert report.ranks is not None
    first, second = report.ranks.rows
    assert first.backward is not None
    rows = (first, replace(second, backward=first.backward - 6_000_000, peak=first.peak))
    assert report.loader is not None
    loader = replace(report.loader, items_per_second=800.0, possible_items_per_second=1200.0)
    return replace(report, ranks=replace(report.ranks, rows=rows), loader=loader, scaled_steps=40, skipped_steps=3)


def _device() -> DeviceFacts:
    blocks = (Block(address=0, size=40, state="active_allocated"), Block(address=40, size=60, state="inactive"))
    segment = Segment(address=0, total_size=100, is_small=False, is_expandable=False, blocks=blocks)
    return DeviceFacts(device="cuda:0", name="GPU", segments=(segment,))


def _cell() -> CellRecord:
    change = DeviceChange(device="cuda:0", before=0, after=40, reserved_before=0, reserved=100, peak=50)
    shares = {name: (Share("cuda:0", "losses", 7),) for name in ("came", "went", "stale")}
    return CellRecord(cell=3, raised=False, devices=(change,), **shares)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What two notebooks write, each to one file after cells and to one after a fit."""
    pytest.importorskip("prometheus_client")
    for notebook in NOTEBOOKS:
        monkeypatch.setenv("JPY_SESSION_NAME", notebook)
        name = tmp_path / Path(notebook).stem
        cells = open_sink(f"prometheus:{name}-cells.prom")
        cells.log("In[3]", cell_figures(_cell(), (_device(),)))
        cells.log("", reading_figures(Reading((Counted(device="cuda:0", allocated=40, reserved=100, peak=60),), heap=9)))
        open_sink(f"prometheus:{name}-fit.prom").write(_fit())
    return tmp_path


def _series(folder: Path) -> list[tuple[str, str, dict[str, str], float]]:
    """Return (file, name, labels, value) of all that is written."""
    from prometheus_client.parser import text_string_to_metric_families

    return [
        (file.name, sample.name, dict(sample.labels), sample.value)
        for file in sorted(folder.glob("*.prom"))
        for family in text_string_to_metric_families(file.read_text())
        for sample in family.samples
    ]


def _queries() -> list[tuple[str, str]]:
    """Return (title of the panel, query) of the board."""
    return [(panel["title"], target["expr"]) for panel in BOARD["panels"] for target in panel.get("targets", ())]


def test_every_query_of_the_board_finds_what_is_written(folder: Path) -> None:
    series = _series(folder)
    for title, query in _queries():
        sides = []
        for side in query.split(" / "):
            selector = SELECTOR.fullmatch(side)
            assert selector, f"{title}: {side}"
            name, of = selector.groups()
            found = [tuple(sorted(labels.items())) for _, each, labels, _ in series if each == name]
            sides.append({labels for labels in found if of in (None, dict(labels).get("of"))})
        both = set.intersection(*sides)
        assert {dict(labels)["notebook"] for labels in both} == set(NOTEBOOKS), f"{title}: {query}"


def test_the_page_names_figures_that_are_written(folder: Path) -> None:
    names = {name for _, name, _, _ in _series(folder)}

    assert set(re.findall(r"nbguard_\w+", PAGE)) <= names
    assert set(re.findall(r"\| ([A-Z][\w ()]+) \| `nbguard", PAGE)) - {"A batch by phase, step, items"} <= {
        panel["title"] for panel in BOARD["panels"]
    }


def test_the_board_has_what_people_ask_for(folder: Path) -> None:
    values = {(name, labels.get("of")): value for _, name, labels, value in _series(folder)}

    assert values["nbguard_memory_stranded_bytes", "cuda:0"] == 60
    assert values["nbguard_skipped_steps", None] / values["nbguard_scaled_steps", None] == 3 / 40
    assert [values["nbguard_rank_wait_for_ranks_seconds", f"rank {n}"] for n in (0, 1)] == [pytest.approx(0.006), 0]
    asked = " ".join(query for _, query in _queries())
    for name in ("memory_stranded", "phase_share_ratio", "rank_wait_for_ranks", "skipped_steps"):
        assert f"nbguard_{name}" in asked


def test_files_of_two_notebooks_can_be_collected_together(folder: Path) -> None:
    """The node exporter refuses a series that is in two files, and a name with two explanations."""
    series = _series(folder)
    own = [(name, *sorted(labels.items())) for _, name, labels, _ in series]
    helps = {line.split(" ", 3)[2]: set[str]() for file in folder.glob("*.prom") for line in _help(file)}
    for file in folder.glob("*.prom"):
        for line in _help(file):
            helps[line.split(" ", 3)[2]].add(line)

    assert len(own) == len(set(own))
    assert [name for name, lines in helps.items() if len(lines) > 1] == []


def _help(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.startswith("# HELP")]


def test_panels_of_the_board_do_not_overlap() -> None:
    taken = [
        (x, y)
        for panel in BOARD["panels"]
        for place in (panel["gridPos"],)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(taken) == len(set(taken))
    assert max(x for x, _ in taken) < 24
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(numbers) == len(set(numbers))


def test_figures_of_the_ranks_are_left_out_without_ranks() -> None:
    assert not [each for each in figures(replace(_fit(), ranks=None, scaled_steps=0)) if each.name.startswith(("rank", "skip"))]


@pytest.fixture
def prometheus(folder: Path) -> Iterator[str]:
    """The address of a Prometheus that reads the files by HTTP, as it reads a node exporter."""
    text = "".join(dict.fromkeys("".join(file.read_text() for file in sorted(folder.glob("*.prom"))).splitlines(keepends=True)))
    (folder / "metrics").write_text(text)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    exporter = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=exporter.serve_forever, daemon=True).start()
    target, port = f"127.0.0.1:{exporter.server_port}", free_port()
    jobs = {"scrape_configs": [{"job_name": "node", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}]}
    (folder / "prometheus.yml").write_text(json.dumps(jobs))
    options = [
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(["prometheus", *options], stdout=log, stderr=log, cwd=folder)
    yield f"http://127.0.0.1:{port}"
    server.terminate()
    server.wait(20)
    exporter.shutdown()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool is installed (apt install prometheus)")
def test_promtool_takes_the_alerts_of_the_page(tmp_path: Path) -> None:
    (rules,) = re.findall(r"```yaml\n(.+?)```", PAGE, re.DOTALL)
    (tmp_path / "rules.yml").write_text(rules)

    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "4 rules found" in done.stdout


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus is installed (apt install prometheus)")
def test_prometheus_itself_answers_every_query(prometheus: str) -> None:
    wait_until(lambda: _ask(prometheus, 'nbguard_problems{notebook="/a/two.ipynb"}'), "the first scrape", 30)

    for title, query in _queries():
        found = _ask(prometheus, query.replace("$notebook", ".*"))
        assert {each["metric"]["notebook"] for each in found} == set(NOTEBOOKS), f"{title}: {query}"
    for rule in re.findall(r"expr: (.+)", PAGE):
        assert _ask(prometheus, re.sub(" > .+", "", rule)), rule
    variable = next(each for each in BOARD["templating"]["list"] if each["name"] == "notebook")
    selector = re.fullmatch(r"label_values\((.+), notebook\)", variable["query"]["query"])
    assert selector
    assert {each["metric"]["notebook"] for each in _ask(prometheus, selector[1])} == set(NOTEBOOKS)


def _ask(address: str, query: str) -> list[dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=5) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except OSError:
        return []  # not up yet
    return found
