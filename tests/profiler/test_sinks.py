"""Reports are written to real logs, by their own libraries, and read back."""

from __future__ import annotations

import csv
import json
import random
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import nbguard
from nbguard.errors import NbguardError
from nbguard.frontend.notebook.listeners.memory_log import cell_figures, reading_figures
from nbguard.memory.core.facts import Block, Counted, DeviceFacts, Reading, Segment
from nbguard.memory.reports.cell_ledger import CellRecord, DeviceChange, Share
from nbguard.training.profiler.analysis.compare import figures, summary
from nbguard.training.profiler.analysis.report import (
    EpochRow,
    FitFinding,
    FitReport,
    MemoryPoint,
    MemoryReport,
    Overhead,
    PhasePeak,
    TimeRow,
    Timing,
)
from nbguard.training.profiler.analysis.time import phase_log
from nbguard.training.profiler.sinks import open_sink, own_random
from nbguard.training.runs.analysis.record import RunRecord
from nbguard.training.runs.comparing import compare, record_of
from tests.runs.records import run

MS = 1_000_000
STEP = "nbguard/step_median_seconds"
WAIT = "nbguard/phase_median_seconds/wait for data"
EPOCH = "nbguard/epoch_total_seconds/training"


def _report(step: int = 12 * MS) -> FitReport:
    rows = (
        TimeRow(phase=phase_log.WAIT, group="batch", total=600 * MS, median=5 * MS, p95=9 * MS),
        TimeRow(phase=phase_log.FORWARD, group="batch", total=300 * MS, median=3 * MS, p95=4 * MS),
        TimeRow(phase=phase_log.FORWARD, group="validation", total=50 * MS),
        TimeRow(phase=phase_log.OTHER, group="around", total=50 * MS),
    )
    epochs = (
        EpochRow(number=0, is_training=True, batches=40, total=500 * MS, wait=300 * MS),
        EpochRow(number=0, is_training=False, batches=10, total=25 * MS, wait=5 * MS),
        EpochRow(number=1, is_training=True, batches=40, total=400 * MS, wait=0),
    )
    timing = Timing(
        wall=1000 * MS, rows=rows, batches=80, warm_up=3, first=40 * MS, step=step, step_p95=15 * MS, epochs=epochs, fits=1
    )
    memory = MemoryReport(
        device="cuda:0",
        source="torch.cuda",
        peak=3 << 30,
        start=1 << 20,
        end=2 << 20,
        phases=(PhasePeak(phase_log.BACKWARD, 3 << 30),),
    )
    finding = FitFinding(
        kind="eps", severity="problem", what="eps rounds to zero", evidence="1e-8 in float16", change="eps=1e-4"
    )
    first = ("Use 2 workers: 5.00 ms less per batch",)
    overhead = Overhead(per_mark=900, marks=1000, watching=2 * MS, share=0.003)
    return FitReport(
        title="In[7] · fastai fit",
        ending="complete",
        timing=timing,
        overhead=overhead,
        first=first,
        memory=memory,
        findings=(finding,),
    )


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of the test's own: some libraries write where the program runs."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def unchanged() -> Iterator[None]:
    """Whatever a library draws, the program's own random numbers go on as without it."""
    random.seed(5)
    np.random.seed(5)
    yield
    found = random.random(), np.random.rand()
    random.seed(5)
    np.random.seed(5)
    assert found == (random.random(), np.random.rand())


def test_figures_have_units_and_what_is_not_known_is_left_out() -> None:
    found = {(each.key, each.epoch): each.value for each in figures(_report())}

    assert found[STEP, None] == 0.012
    assert found[WAIT, None] == 0.005
    assert found["nbguard/phase_share_ratio/wait for data", None] == 0.6
    assert found["nbguard/phase_total_seconds/validation forward", None] == 0.05
    assert found["nbguard/memory_peak_bytes", None] == 3 << 30
    assert found["nbguard/epochs", None] == 2
    assert found["nbguard/problems", None] == 1
    assert found[EPOCH, 1] == 0.4
    assert not [key for key, _ in found if "gpu" in key or "reserved" in key]
    assert ("nbguard/phase_median_seconds/validation forward", None) not in found
    assert sum(value for (key, _), value in found.items() if "phase_share" in key) == pytest.approx(1)


def test_memory_is_told_by_epoch() -> None:
    report = _report()
    starts = (0, 500 * MS, 600 * MS)
    epochs = tuple(replace(epoch, start=start) for epoch, start in zip(report.timing.epochs, starts, strict=True))
    levels = ((10, 5, 8), (400, 9, 9), (500, 4, 12), (599, 3, 12), (700, 6, 12), (999, 2, 12))
    points = tuple(
        MemoryPoint(at=at * MS, phase=phase_log.FORWARD, batch=1, allocated=allocated, reserved=reserved)
        for at, allocated, reserved in levels
    )
    assert isinstance(report.memory, MemoryReport)
    report = replace(report, timing=replace(report.timing, epochs=epochs), memory=replace(report.memory, points=points))
    found = {(each.name, each.of, each.epoch): each.value for each in figures(report)}

    assert [found["epoch_memory_peak", of, epoch] for of, epoch in _EPOCHS] == [9, 4, 6]
    assert [found["epoch_memory_end", of, epoch] for of, epoch in _EPOCHS] == [9, 3, 2]
    assert [found["epoch_memory_unused", of, epoch] for of, epoch in _EPOCHS] == [0, 9, 10]
    assert [found["epoch_memory_reserved", of, epoch] for of, epoch in _EPOCHS] == [9, 12, 12]


_EPOCHS = (("training", 0), ("validation", 0), ("training", 1))


def test_a_fit_of_two_epochs_tells_its_memory_by_epoch() -> None:
    import torch

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(32, 4)), batch_size=4)
    model = torch.nn.Linear(4, 1)
    with nbguard.profile_fit(show=False) as profile:
        for _ in range(2):
            for (x,) in loader:
                model(x).sum().backward()

    found = {(each.of, each.epoch): each.value for each in figures(profile.report) if each.name == "epoch_memory_peak"}
    assert len(found) == 2
    assert isinstance(profile.report.memory, MemoryReport)
    assert 0 < max(found.values()) <= profile.report.memory.peak


def test_csv_has_a_row_per_figure_and_later_fits_below(tmp_path: Path, unchanged: None) -> None:
    for step in (12, 8):
        open_sink("csv:fits.csv").write(_report(step * MS))

    with (tmp_path / "fits.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    assert len(rows) == 2 * len(figures(_report()))
    assert [float(row["value"]) for row in rows if row["name"] == "step_median"] == [0.012, 0.008]
    (wait,) = [row for row in rows[: len(rows) // 2] if row["name"] == "phase_median" and row["of"] == phase_log.WAIT]
    assert (float(wait["value"]), wait["unit"], wait["title"]) == (0.005, "seconds", "In[7] · fastai fit")
    assert [row["epoch"] for row in rows if row["name"] == "epoch_total"][:3] == ["0", "0", "1"]


def test_a_csv_file_of_something_else_is_refused_before_the_fit(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")

    with pytest.raises(NbguardError, match="has other columns than time,title,name"):
        open_sink("csv:mine.csv")
    assert (tmp_path / "mine.csv").read_text() == "a,b\n1,2\n"


def test_tensorboard_has_scalars_by_epoch_and_the_text(unchanged: None) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    open_sink("tensorboard:runs/one").write(_report())
    events = EventAccumulator("runs/one")
    events.Reload()

    assert [event.value for event in events.Scalars(STEP)] == [pytest.approx(0.012)]
    assert [(event.step, event.value) for event in events.Scalars(EPOCH)] == [(0, 0.5), (1, pytest.approx(0.4))]
    (text,) = events.Tensors("nbguard/report/text_summary")
    assert text.tensor_proto.string_val[0].decode() == summary(_report())


def test_prometheus_text_is_read_by_its_own_parser(tmp_path: Path, unchanged: None) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    sink = open_sink("prometheus:fit.prom")
    for step in (12, 8):
        sink.write(_report(step * MS))
    families = text_string_to_metric_families((tmp_path / "fit.prom").read_text())
    found = {(sample.name, sample.labels.get("of")): sample.value for family in families for sample in family.samples}

    assert found["nbguard_step_median_seconds", None] == 0.008
    assert found["nbguard_phase_median_seconds", phase_log.WAIT] == 0.005
    assert found["nbguard_memory_peak_bytes", None] == 3 << 30
    assert found["nbguard_epoch_total_seconds", "training"] == 0.4  # the last one


def _recorded(torch_seed: str = "42") -> FitReport:
    return replace(_report(), record=run(("seeds", "torch", torch_seed), ("place", "notebook", "/home/me/work.ipynb")))


def test_tensorboard_has_the_record_as_hyper_parameters_and_text(unchanged: None) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    open_sink("tensorboard:runs/one").write(_recorded())
    events = EventAccumulator("runs/one")
    events.Reload()

    data = plugin_data_pb2.HParamsPluginData()
    data.ParseFromString(events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content)
    values = data.session_start_info.hparams
    assert values["seeds.torch"].number_value == 42
    assert values["hyper-parameters.lr of group 0"].number_value == 0.001
    assert values["versions.torch"].string_value == "2.13.0"
    (text,) = events.Tensors("nbguard/run/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert RunRecord.from_data(json.loads(shown.removeprefix("```json\n").removesuffix("\n```"))) == _recorded().record
    assert [path.name for path in Path("runs").rglob("*") if path.is_dir()] == ["one"]


@pytest.mark.slow
def test_mlflow_has_the_record_as_parameters_tags_and_a_file(mlflow: Any, tmp_path: Path, unchanged: None) -> None:
    _check_mlflow_record(mlflow)


def test_mlflows_file_store_takes_it_too(mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/store")
    _check_mlflow_record(mlflow)
    assert list((tmp_path / "store").rglob("nbguard.seeds.torch"))


def _check_mlflow_record(mlflow: Any) -> None:
    """Log a record to a new run and to one that has a parameter of that name already, and read both back."""
    state = random.getstate()
    open_sink("mlflow:fits").write(_recorded())
    client = mlflow.MlflowClient()
    (made,) = client.search_runs([client.get_experiment_by_name("fits").experiment_id])

    assert made.data.params["nbguard.seeds.torch"] == "42"
    assert made.data.params["nbguard.hyper-parameters.lr of group 0"] == "0.001"
    tags = made.data.tags
    assert (tags["mlflow.source.name"], tags["mlflow.source.type"]) == ("/home/me/work.ipynb", "NOTEBOOK")
    assert (tags["mlflow.source.git.commit"], tags["mlflow.source.git.diff"]) == ("1234", "-a\n+b")
    assert record_of(made.info.run_id) == _recorded().record
    with mlflow.start_run() as mine:
        mlflow.log_param("nbguard.seeds.torch", "mine")
        for seed in ("42", "43"):
            open_sink("mlflow").write(_recorded(seed))
    assert client.get_run(mine.info.run_id).data.params["nbguard.seeds.torch"] == "mine"
    assert compare(made.info.run_id, mine.info.run_id).sentence == "Most likely cause: seeds, torch: 42 → 43"
    random.setstate(state)


def test_a_run_that_mlflow_does_not_have_is_said(mlflow: Any) -> None:
    with pytest.raises(NbguardError, match=r"^the MLflow run 0{32} has no record: "):
        record_of("0" * 32)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    found = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    found.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    yield found
    found.set_tracking_uri(None)


def test_mlflow_makes_a_run_of_its_own_and_goes_on_with_an_active_one(mlflow: Any, unchanged: None) -> None:
    sink = open_sink("mlflow:fits")
    sink.write(_report())
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("fits").experiment_id])

    assert (run.info.run_name, run.info.status) == ("In[7] · fastai fit", "FINISHED")
    assert run.data.metrics[STEP] == 0.012
    assert run.data.metrics[WAIT] == 0.005
    assert [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, EPOCH)] == [(0, 0.5), (1, 0.4)]
    assert mlflow.artifacts.load_text(f"{run.info.artifact_uri}/nbguard.md") == summary(_report())

    state = random.getstate()
    with mlflow.start_run() as mine:
        random.setstate(state)  # MLflow draws the name of the run
        open_sink("mlflow").write(_report(8 * MS))
        assert mlflow.active_run().info.run_id == mine.info.run_id
    assert client.get_run(mine.info.run_id).data.metrics[STEP] == 0.008
    assert client.get_experiment_by_name("nbguard") is None


def test_an_mlflow_store_that_cannot_be_read_is_said_before_the_fit(mlflow: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("my notes, and no database" * 100)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/notes.txt")

    with pytest.raises(NbguardError, match=r"^cannot log to MLflow: .*file is not a database"):
        open_sink("mlflow")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    found = pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    found.teardown()  # what it has read of the environment until now
    yield found
    found.teardown()


@pytest.mark.slow
def test_wandb_offline_makes_a_run_without_a_login(wandb: Any, monkeypatch: pytest.MonkeyPatch, unchanged: None) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")

    open_sink("wandb:fits").write(_report())

    history, last = _wandb_run()
    assert wandb.run is None
    assert last[STEP] == 0.012
    assert last[WAIT] == 0.005
    assert last["nbguard/report"] == summary(_report())
    assert [(row["nbguard/epoch"], row[EPOCH]) for row in history] == [(0, 0.5), (1, 0.4)]


def test_wandb_has_the_record_in_its_config(wandb: Any, monkeypatch: pytest.MonkeyPatch, unchanged: None) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")

    open_sink("wandb:fits").write(_recorded())

    _, last = _wandb_run()
    assert RunRecord.from_data(json.loads(last["nbguard/run"])) == _recorded().record
    config = _wandb_config()
    assert config["nbguard"]["seeds"]["torch"] == 42
    assert config["nbguard"]["versions"]["torch"] == "2.13.0"


def test_wandb_goes_on_with_an_active_run_and_leaves_it_open(
    wandb: Any, monkeypatch: pytest.MonkeyPatch, unchanged: None
) -> None:
    with wandb.init(mode="offline", project="mine") as mine:
        mine.log({"loss": 0.5})
        open_sink("wandb").write(_report())
        assert wandb.run is mine
        mine.log({"loss": 0.25})

    history, last = _wandb_run()
    assert [row["loss"] for row in history if "loss" in row] == [0.5, 0.25]
    assert (last[STEP], last["loss"]) == (0.012, 0.25)


def test_wandb_without_a_login_says_so_before_the_fit_and_asks_nothing(wandb: Any) -> None:
    with pytest.raises(NbguardError, match=r"^W&B has no login here; run: wandb login, or .*WANDB_MODE=offline$"):
        open_sink("wandb")


def _wandb_run() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the history and the last summary of the one offline run in this folder, once W&B's service has written it."""
    until = time.monotonic() + 60
    while not (found := _written_run())[1] and time.monotonic() < until:
        time.sleep(0.1)
    return found


def _written_run() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what is written so far, by W&B's own message types; nothing before the record that ends a run."""
    from wandb.proto import wandb_internal_pb2

    has_ended = False
    _CONFIG.clear()
    (path,) = Path.cwd().glob("wandb/offline-run-*/run-*.wandb")
    history: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    for data in _log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            history.append({_key(item): json.loads(item.value_json) for item in record.history.item})
        elif record.WhichOneof("record_type") == "summary":
            last |= {_key(item): json.loads(item.value_json) for item in record.summary.update}
        elif record.WhichOneof("record_type") in ("config", "run"):
            changes = record.config if record.HasField("config") else record.run.config
            _CONFIG.update({_key(item): json.loads(item.value_json) for item in changes.update})
        has_ended |= record.WhichOneof("record_type") == "exit"
    return (history, last) if has_ended else ([], {})


_CONFIG: dict[str, Any] = {}
"""The config of the run that was read last."""


def _wandb_config() -> dict[str, Any]:
    return dict(_CONFIG)


def _key(item: Any) -> str:
    return item.key or "/".join(item.nested_key)


def _log_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after W&B's seven bytes: checksum, length, kind, then the data."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            return  # the rest is being written
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


@pytest.mark.parametrize("kind", ["tensorboard:runs", "wandb", "mlflow", "prometheus:fit.prom"])
def test_a_library_that_is_missing_is_named_before_the_fit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = {"prometheus": "prometheus_client"}.get(kind.partition(":")[0], kind.partition(":")[0])
    monkeypatch.setitem(sys.modules, module, None)  # what import takes for missing

    with pytest.raises(NbguardError, match=r"^this log needs [\w-]+, which is not installed; run: pip install [\w-]+$"):
        open_sink(kind)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("excel:a.xls", r"^no log is called 'excel'; write csv:FILE, tensorboard:DIR, wandb"),
        ("csv", r"^a csv log needs a place to write to; write csv:FILE$"),
        ("tensorboard:", r"write tensorboard:DIR$"),
        ("csv:none/fits.csv", r"there is no folder .*none; make it"),
        ("prometheus:none/fit.prom", r"there is no folder .*none; make it"),
    ],
)
def test_what_cannot_be_written_is_said_in_a_line(spec: str, words: str) -> None:
    with pytest.raises(NbguardError, match=words) as raised:
        open_sink(spec)
    assert "\n" not in str(raised.value)


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")

    with pytest.raises(NbguardError, match=r"cannot make the folder .*runs: Not a directory"):
        open_sink("tensorboard:file/runs")


def test_what_a_library_draws_does_not_count(unchanged: None) -> None:
    with own_random("a library"):
        random.random()
        np.random.rand()


def _cell_record(cell: int, allocated: int) -> CellRecord:
    change = DeviceChange(device="cuda:0", before=0, after=allocated, reserved_before=0, reserved=2 * allocated)
    return CellRecord(cell=cell, raised=False, devices=(change,), stale=(Share("cuda:0", "losses", 7),))


def _logged_cells(spec: str) -> None:
    sink = open_sink(spec)
    for cell, allocated in ((3, 10), (4, 30)):
        sink.log(f"In[{cell}]", cell_figures(_cell_record(cell, allocated), (_DEVICE,)))
    sink.close()


_DEVICE = DeviceFacts(
    device="cuda:0",
    name="GPU",
    segments=(
        Segment(
            address=0,
            total_size=100,
            is_small=False,
            is_expandable=False,
            blocks=(Block(address=0, size=40, state="active_allocated"), Block(address=40, size=60, state="inactive")),
        ),
    ),
)


def test_figures_of_a_cell_have_what_is_unused_stranded_and_free_in_one_piece() -> None:
    found = {each.key: each.value for each in cell_figures(_cell_record(3, 10), (_DEVICE,))}

    assert found == {
        "nbguard/memory_allocated_bytes/cuda:0": 10,
        "nbguard/memory_reserved_bytes/cuda:0": 20,
        "nbguard/memory_unused_bytes/cuda:0": 10,
        "nbguard/cell_memory_change_bytes/cuda:0": 10,
        "nbguard/cell_memory_became_stale_bytes/cuda:0": 7,
        "nbguard/memory_stranded_bytes/cuda:0": 60,
        "nbguard/memory_largest_free_bytes/cuda:0": 60,
    }


def test_cells_are_rows_of_a_csv_file(tmp_path: Path, unchanged: None) -> None:
    _logged_cells("csv:cells.csv")

    with (tmp_path / "cells.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == "memory_allocated"]
    assert [(row["title"], row["epoch"], float(row["value"])) for row in rows] == [("In[3]", "3", 10), ("In[4]", "4", 30)]


def test_cells_are_steps_of_one_tensorboard_file(unchanged: None) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _logged_cells("tensorboard:runs/cells")
    events = EventAccumulator("runs/cells")
    events.Reload()

    scalars = events.Scalars("nbguard/memory_allocated_bytes/cuda:0")
    assert [(event.step, event.value) for event in scalars] == [(3, 10), (4, 30)]
    assert len(list(Path("runs/cells").iterdir())) == 1


def test_the_file_for_prometheus_has_the_latest_cell_and_what_came_since(tmp_path: Path, unchanged: None) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    _logged_cells("prometheus:cells.prom")
    sink = open_sink("prometheus:cells.prom")
    sink.log("In[4]", cell_figures(_cell_record(4, 30)))
    sink.log("", reading_figures(Reading((Counted(device="cuda:0", allocated=50, reserved=60),))))
    families = text_string_to_metric_families((tmp_path / "cells.prom").read_text())
    found = {(sample.name, sample.labels.get("of")): sample.value for family in families for sample in family.samples}

    assert found["nbguard_memory_allocated_bytes", "cuda:0"] == 50
    assert found["nbguard_memory_unused_bytes", "cuda:0"] == 10
    assert found["nbguard_cell_memory_became_stale_bytes", "cuda:0"] == 7


def test_mlflow_gets_a_run_of_the_memorys_own_or_goes_on_with_the_active_one(mlflow: Any, unchanged: None) -> None:
    state = random.getstate()
    _logged_cells("mlflow:cells")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("cells").experiment_id])
    key = "nbguard/memory_allocated_bytes/cuda:0"
    assert (run.info.run_name, run.info.status) == ("memory from In[3] on", "FINISHED")
    history = client.get_metric_history(run.info.run_id, key)
    assert [(each.step, each.value) for each in history] == [(3, 10), (4, 30)]
    with mlflow.start_run() as mine:
        _logged_cells("mlflow")
    assert client.get_run(mine.info.run_id).data.metrics[key] == 30
    random.setstate(state)


def test_wandb_logs_cells_to_the_run_that_is_active(wandb: Any, monkeypatch: pytest.MonkeyPatch, unchanged: None) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    state = random.getstate()
    _logged_cells("wandb:fits")  # no run is active: it is left out, and none is begun
    assert wandb.run is None
    with wandb.init(project="mine", settings=wandb.Settings(silent=True, console="off")):
        _logged_cells("wandb")
    random.setstate(state)

    history, _ = _wandb_run()
    assert [row["nbguard/cell"] for row in history] == [3, 4]
    assert [row["nbguard/memory_allocated_bytes/cuda:0"] for row in history] == [10, 30]
