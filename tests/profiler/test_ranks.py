"""Two real ranks on CPU: rank 0 reports both, whoever of them is slow, dead, asleep or not there."""

from __future__ import annotations

import csv
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbguard.memory.allocator.model.settings import parse_version
from nbguard.training.profiler.analysis.ranks import GradientSums, sums_finding
from nbguard.training.profiler.analysis.report import FitFinding, RankReport, RankRow
from tests.profiler.rank_fits import BATCHES, CHECKED, WAIT

ROOT = Path(__file__).resolve().parents[2]
FITS = ("straggler", "killed", "hangs", "alone", "uneven", "folderless", "frozen", "twice", "profiled", "fastai", *CHECKED)
SHARDED = ("sharded",) if parse_version(torch.__version__) >= (2, 6) else ()  # `fully_shard` is public


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the ranks of all fits have left what they had to say; temporary files of theirs are below it."""
    made = tmp_path_factory.mktemp("ranks")
    (made / "tmp").mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "tests.profiler.rank_fits", str(made), *FITS, *SHARDED]
    subprocess.run(command, cwd=ROOT, env=_environment(made), check=True, timeout=200)
    return made


def _environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "MASTER_", "OMP_"))}
    return {**kept, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}


def _report(folder: Path, name: str) -> RankReport:
    path = folder / f"{name}.json"
    assert path.exists(), (folder / f"{name}-0.log").read_text()
    data: dict[str, Any] = json.loads(path.read_text())
    rows = tuple(RankRow(**row) for row in data["rows"])
    findings = tuple(FitFinding(**each) for each in data["findings"])
    return RankReport(world=data["world"], rows=rows, findings=findings, note=data["note"], launch=data["launch"])


def _finding(report: RankReport, word: str) -> FitFinding:
    (found,) = [finding for finding in report.findings if word in finding.what]
    return found


@pytest.mark.slow
def test_every_rank_is_reported(folder: Path) -> None:
    report = _report(folder, "straggler")

    assert [(row.rank, row.state, row.batches) for row in report.rows] == [(0, "complete", BATCHES), (1, "complete", BATCHES)]
    assert report.rows[0].pid != report.rows[1].pid
    sums = _finding(report, "of gradients are summed")
    assert (sums.severity, sums.what[:4]) == ("note", "36 B")
    assert "1 all-reduce within one host by gloo" in sums.evidence
    assert "--check-ranks 100" in report.note


@pytest.mark.skipif(not SHARDED, reason="this PyTorch has no fully_shard")
def test_the_bytes_of_shards_are_told_and_the_mesh_that_keeps_gathers_within_hosts_computes_the_same(folder: Path) -> None:
    found = _finding(_report(folder, "sharded"), "of shards go")
    assert found.what.startswith("288 B")  # 36 parameters of 4 B, and their gradients
    assert "1 all_gather of 144 B over 2 hosts" in found.evidence
    assert "1 reduce_scatter of 144 B over 2 hosts" in found.evidence
    assert 'mesh=init_device_mesh("cpu", (2, 2)' in found.change

    after = _finding(_report(folder, "meshed"), "of shards go")
    assert "1 all_gather of 144 B within one host" in after.evidence
    assert "1 all_reduce of 72 B over 2 hosts" in after.evidence
    assert after.change == ""
    losses = re.findall(r"loss .*", (folder / "sharded-0.log").read_text())
    assert len(losses) == 2
    assert losses[0] == losses[1]


def test_the_rank_whose_data_is_late_is_the_straggler_though_all_steps_are_as_long(folder: Path) -> None:
    report = _report(folder, "straggler")
    found = _finding(report, "straggler")
    first, second = report.rows

    assert found.what == "Rank 1 is the straggler"
    assert found.time is not None
    assert 10e6 < found.time < 40e6  # planted: 20 ms
    assert "of the difference is waiting for data. The others wait for it, so their backward pass takes" in found.evidence
    assert (second.backward or 0) < (first.backward or 0)


def test_a_rank_with_more_memory_is_named(folder: Path) -> None:
    found = _finding(_report(folder, "straggler"), "memory")

    assert (found.what, found.nbytes) == ("Rank 1 takes more memory", 2 << 30)


def test_a_variable_that_differs_is_named_and_those_that_must_are_not(folder: Path) -> None:
    report = _report(folder, "straggler")

    assert _finding(report, "not the same").what == "NCCL_DEBUG is not the same on all ranks"
    assert _finding(report, "not the same").evidence == "rank 0: WARN; rank 1: INFO"


def test_a_rank_that_was_killed_is_named_with_its_last_phase_and_not_waited_for(folder: Path) -> None:
    report = _report(folder, "killed")
    found = _finding(report, "died")

    assert found.what == "Rank 1 died in batch 5, after loss"
    assert f"its process {report.rows[1].pid} is gone" in found.evidence
    assert report.rows[0].state == "error: RuntimeError"
    assert float((folder / "killed-0.seconds").read_text()) < WAIT
    said = (folder / "killed-0.log").read_text()
    assert f"nbguard: rank 1 died in batch 5, after loss; its process {report.rows[1].pid} is gone\n" in said
    assert f"nbguard, rank 0: rank 1 died (its process {report.rows[1].pid} is gone)" in said


def test_a_rank_that_hangs_is_named_with_what_it_did_last(folder: Path) -> None:
    report = _report(folder, "hangs")
    found = _finding(report, "hangs")

    assert found.what == "Rank 1 hangs in batch 5, after loss"
    assert "next comes the backward pass" in found.evidence
    assert re.search(rf"py-spy dump --pid {report.rows[1].pid}\b", found.change)
    assert re.fullmatch(r"no progress for \d\.\d\d s in batch 5, after loss", report.rows[1].state)
    assert float((folder / "hangs-0.seconds").read_text()) < 3 * WAIT
    said = (folder / "hangs-0.log").read_text()
    assert re.search(r"nbguard: no rank here made progress for .+: rank 0 in batch 5, after loss; rank 1 in batch 5", said)


def test_the_watch_of_ranks_is_on_and_names_the_call_that_is_waited_for(folder: Path) -> None:
    said = (folder / "hangs-0.log").read_text()

    assert (
        "nbguard, rank 0: rank 1 did not reach the `all_reduce` of 9 × float32 that rank 0 waits for in DDP backward at" in said
    )
    assert f"`rank_fits.py:{_line('loss.backward()')} in plain()`" in said
    assert _report(folder, "hangs").findings[0].what.startswith("rank 1 did not reach the `all_reduce` of 9 × float32")


def _line(code: str) -> int:
    source = Path(__file__).with_name("rank_fits.py").read_text().splitlines()
    return next(number for number, line in enumerate(source, 1) if line.strip() == code)


def test_a_rank_that_does_not_take_part_is_not_waited_for_long(folder: Path) -> None:
    report = _report(folder, "alone")

    assert _finding(report, "Nothing is known of rank 1").severity == "advice"
    assert report.rows[1].state == "not heard of"
    assert float((folder / "alone-0.seconds").read_text()) < WAIT


def test_different_numbers_of_batches_are_named(folder: Path) -> None:
    assert _finding(_report(folder, "uneven"), "numbers of batches").evidence == "rank 0: 10, rank 1: 7"


def test_ranks_that_hold_the_same_model_are_told_so_and_what_differs_by_design(folder: Path) -> None:
    report = _report(folder, "agrees")

    words = ("between ranks", "seeds", "of the data", "learning rates")
    assert not [finding for finding in report.findings if any(word in finding.what for word in words)]
    assert _finding(report, "same model").evidence == "15 tensors compared bit by bit before 6 steps, from 1 to 10"
    assert _finding(report, "norm.").what.endswith("of BatchNorm1d differs by design")
    assert _finding(report, "Dropout").what == "Dropout differs by design"
    assert _finding(report, "learns from").what == "A step learns from 4 samples"
    assert _finding(report, "learns from").evidence.startswith("2 ranks with 2 + 2, at a learning rate of 0.01;")


def test_the_first_parameter_that_differs_is_named_with_its_step(folder: Path) -> None:
    report = _report(folder, "drifts")
    found = _finding(report, "parameter")

    assert found.what == "The parameter `head.bias` of Linear differs between ranks"
    assert found.evidence == "rank 0 and rank 1 since the optimizer's step 6; they agreed before step 4"
    assert _finding(report, "seeds").evidence == "rank 0: seed 0; rank 1: seed 1"


def test_the_store_alone_will_do(folder: Path) -> None:
    report = _report(folder, "folderless")

    assert [row.state for row in report.rows] == ["complete", "complete"]


def test_a_rank_whose_host_of_the_store_is_frozen_goes_on_all_the_same(folder: Path) -> None:
    report = _report(folder, "frozen")

    assert [row.state for row in report.rows] == ["complete", "complete"]
    assert float((folder / "frozen-1.seconds").read_text()) < 4


def test_a_profile_of_ranks_is_shown_and_written_by_the_first_of_them(folder: Path) -> None:
    shown = (folder / "profiled-0.log").read_text()
    with (folder / "profiled.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["name"] == "batches"]

    assert "Rank 1 is the straggler" in shown
    assert re.fullmatch(r"nbguard: rank 1 of 2, process \d+ on .+\n", (folder / "profiled-1.log").read_text())
    assert shown.count("nbguard: rank 0 of 2, process") == 1
    assert [float(row["value"]) for row in rows] == [BATCHES]


def test_two_fits_of_one_program_are_told_apart(folder: Path) -> None:
    first, second = _report(folder, "first"), _report(folder, "twice")

    assert [row.batches for row in (*first.rows, *second.rows)] == [BATCHES] * 4
    assert (first.rows[1].wait or 0) > 20e6 > (second.rows[1].wait or 0)


def test_a_learner_under_distrib_ctx_is_reported(folder: Path) -> None:
    pytest.importorskip("accelerate")
    report = _report(folder, "fastai")

    assert [(row.state, row.batches) for row in report.rows] == [("complete", 2 * BATCHES)] * 2
    assert all(row.backward for row in report.rows)


def test_other_ranks_say_once_which_they_are_and_no_file_stays(folder: Path) -> None:
    told = {path.stem: path.read_text().splitlines() for path in folder.glob("*-1.log")}
    del told["hangs-1"]
    for name in SHARDED:  # four ranks: where they are slow, the watch says so, too
        assert told.pop(f"{name}-1")[0].startswith("nbguard: rank 1 of 4, process")

    assert told.keys() == {f"{name}-1" for name in FITS if name != "hangs"}
    for name, lines in told.items():
        alone = name in ("alone-1", "killed-1")  # no fit; its buffer went with it
        assert [line for line in lines if not re.fullmatch(r"nbguard: rank 1 of 2, process \d+ on .+", line)] == []
        assert len(lines) == 1 or alone, name
    left = [path for path in (folder / "tmp").glob("nbguard-*") if stat.S_IMODE(path.stat().st_mode) == 0o700]
    assert not left  # what `folderless` has opened to others is nbguard's no more


@pytest.mark.slow
def test_a_fit_that_accelerate_launches_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "tmp").mkdir()
    launcher = [sys.executable, "-W", "ignore", "-m", "accelerate.commands.launch", "--multi_gpu", "--main_process_port=0"]
    options = ["--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    command = [*launcher, *options, "-m", "tests.profiler.rank_fits", str(tmp_path), "accelerated"]

    run = subprocess.run(command, cwd=ROOT, env=_environment(tmp_path), timeout=200, capture_output=True, text=True)

    assert run.returncode == 0, run.stderr[-3000:]
    assert [(row.state, row.batches) for row in _report(tmp_path, "accelerated").rows] == [("complete", BATCHES)] * 2
    assert not list((tmp_path / "tmp").glob("nbguard-*"))


def test_a_program_of_one_process_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbguard.training.profiler.instruments.rank_watch import RankWatch

    monkeypatch.delenv("WORLD_SIZE", raising=False)

    assert RankWatch().exchange(RankRow(rank=0, host="", pid=0, state="complete")) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert RankWatch().exchange(RankRow(rank=0, host="", pid=0, state="complete")) is None


def test_a_beat_costs_next_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from nbguard.training.profiler.instruments.rank_watch import RankLiveness, pulse_of
    from nbguard.training.ranks.job_board import open_board
    from nbguard.training.ranks.rank import Rank

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    board = open_board(Rank(3, 4))
    heart = RankLiveness(board, 1)
    start = time.perf_counter_ns()
    for batch in range(10_000):
        heart.beat(batch, 4)
    took = (time.perf_counter_ns() - start) / 10_000

    pulse = pulse_of(board, 3, 1)
    heart.close()

    assert pulse is not None
    assert (pulse.pid, pulse.batch, pulse.phase, pulse.is_alive) == (os.getpid(), 9_999, "loss", True)
    assert pulse_of(board, 3, 1) is None
    assert took < 20_000  # some 400 ns
    board.release()
    assert not list(tmp_path.iterdir())


def test_what_killed_jobs_have_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbguard.training.ranks.rank_file import RankFile, job_folder, leave

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    monkeypatch.setenv("MASTER_PORT", "1")
    left = job_folder()
    path = left / "0-1.rank"
    RankFile.create(path).close()
    monkeypatch.setenv("MASTER_PORT", "2")
    os.utime(path, (0, 0))

    leave(job_folder())
    assert [each.name for each in tmp_path.iterdir()] == [left.name]  # its process is alive

    data = path.read_bytes()
    path.write_bytes(data[:8] + dead.pid.to_bytes(8, sys.byteorder) + data[16:])
    os.utime(path, (0, 0))
    leave(job_folder())
    assert not list(tmp_path.iterdir())


def test_the_line_that_makes_the_sums_of_gradients_smaller_runs() -> None:
    sums = GradientSums(nbytes=1, calls=1, backend="gloo", time=2, overlap=0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        exec(sums_finding(sums, 1, 4).change.split("`")[1], {"model": model})
        model(torch.ones(4, 2)).sum().backward()
        assert model.module.weight.grad.tolist() == [[4.0, 4.0]]
    finally:
        dist.destroy_process_group()
