"""The reports of a job's ranks: read back as they were written, merged with the cause first, and safe to be a stranger's."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from nbguard.errors import NbguardError, RankFactsError
from nbguard.frontend.cli import main
from nbguard.frontend.jobs import install
from nbguard.frontend.jobs.failures import JobFailure, RankFailure, failure_of
from nbguard.frontend.jobs.folder import job_report, place_of_process, report_folder, write_failure
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.oom_facts import CodeLine, OomFact, OomNote
from nbguard.memory.out_of_memory.card import OomCard, build_card
from nbguard.render.text import blocks_text
from nbguard.testing import make_cuda_device, make_facts, make_graph, make_segment
from tests.render.test_render import _golden

MiB = 1024**2
GiB = 1024**3
_ECHO = "RuntimeError: Connection closed by peer [127.0.0.1]:7048"


def card() -> OomCard:
    """Return the card of a script that ran out of memory in a function."""
    sizes = {"outputs": 5 * GiB, "main() → net": 2 * GiB}
    graph = make_graph({name: [name] for name in sizes}, {}, sizes, {}, device="cuda:0")
    segments = [make_segment((s.nbytes, "active_allocated"), address=s.address) for s in graph.storages]
    note = OomNote(
        device="cuda:0", requested=GiB, total=8 * GiB, free=GiB // 2, limit=None, allocated=7 * GiB + 96 * MiB, reserved=7 * GiB
    )
    line = CodeLine(None, 31, "loss = net(batch).sum()", "train.py")
    asked = OomFact(device="cuda:0", requested=GiB, line=line, runs_model=True, guard="parts", note=note, is_final=True)
    facts = make_facts(graph, device=make_cuda_device(segments, 8 * GiB, GiB // 2))
    made = build_card(Analysis(replace(facts, oom=asked)))
    assert made is not None
    return made


def failure(rank: int | None = 0, at: float = 100.0, **changed: object) -> RankFailure:
    """Return the failure of a rank of four, which ran out of memory unless `card` says otherwise."""
    known = {"host": "node1", "pid": 4711, "launcher": "torchrun", "job": "a", "error": "OutOfMemoryError: CUDA out of memory"}
    known |= {"place": "train.py:31 in step()", "world": None if rank is None else 4}
    return RankFailure(**({"rank": rank, "at": at, "card": card()} | known | changed))  # type: ignore[arg-type]


def test_a_report_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    for one in (failure(2), failure(None, card=None)):
        write_failure(tmp_path / "reports", one)
        (file,) = (tmp_path / "reports").iterdir()
        read = failure_of(file.read_bytes())
        assert read.to_data() == one.to_data()
        assert blocks_text(read.blocks(), "python") == blocks_text(one.blocks(), "python")
        file.unlink()


def test_a_report_takes_the_place_of_the_same_ranks_earlier_one(tmp_path: Path) -> None:
    for at in (1.0, 2.0):
        write_failure(tmp_path, failure(2, at))

    assert [file.name for file in tmp_path.iterdir()] == ["rank-2.node1.failure.json"]
    assert job_report(tmp_path).failures[0].at == 2.0


def test_the_first_to_run_out_comes_first_and_consequences_last() -> None:
    echo = failure(0, at=99.0, card=None, error=_ECHO)
    other = failure(3, at=99.5, card=None, error="ValueError: a broken image")

    merged = JobFailure.of([echo, other, failure(1, at=100.4), failure(2, at=100.2)])

    assert [each.rank for each in merged.failures] == [2, 1, 3, 0]
    assert [each.rank for each in merged.ran_out] == [2, 1]
    assert merged.silent == ()


def test_ranks_without_a_report_are_named_and_other_jobs_left_out() -> None:
    merged = JobFailure.of([failure(1, at=50.0, job="earlier"), failure(2, at=100.0), failure(2, at=10.0, job="older")])

    assert ([each.rank for each in merged.failures], merged.silent, merged.left_out) == ([2], (0, 1, 3), 2)


def test_golden_jobs(request: pytest.FixtureRequest) -> None:
    echo = failure(0, at=99.0, card=None, error=_ECHO, place="train.py:40")
    shown = [
        failure(2),
        JobFailure.of([echo, failure(1, at=100.4), failure(2, at=100.2)]),
        JobFailure.of([failure(None)]),
        JobFailure.of(
            [replace(echo, error="ValueError: a broken image"), failure(1, 1.0, job="b")], ("x.failure.json: damaged",)
        ),
    ]
    _golden("jobs.txt", "\n\n".join(blocks_text(each.blocks(), "terminal") for each in shown), request)


def test_the_command_shows_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_failure(tmp_path, failure(2))
    (tmp_path / "rank-9.node1.failure.json").write_text("{")

    assert main(["report", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert main(["report", str(tmp_path), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)

    assert text.startswith("Rank 2 ran out of memory")
    assert "rank-9.node1.failure.json cannot be read: it is not JSON" in text
    assert (data["kind"], data["silent"], len(data["damaged"])) == ("job_failure", [0, 1, 3], 1)
    assert data["failures"][0]["card"]["kind"] == "oom_card"
    write_failure(tmp_path, failure(2, card=None))
    assert main(["report", str(tmp_path)]) == 0


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"schema": 1, "kind": "oom_card"}', b"[" * 9999, b"\xff"])
def test_a_file_of_another_kind_is_refused_in_a_line(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(RankFactsError):
        failure_of(content)
    (tmp_path / "x.failure.json").write_bytes(content)
    with pytest.raises(RankFactsError, match=r"has no reports of ranks: x\.failure\.json cannot be read"):
        job_report(tmp_path)


@pytest.mark.parametrize("at", ["NaN", "Infinity", "-1e99", '"nan"'])
def test_a_time_that_is_no_number_is_refused(at: str) -> None:
    text = json.dumps(failure(2).to_data() | {"at": "AT"}).replace('"AT"', at)

    with pytest.raises(RankFactsError, match="its field 'at'"):
        failure_of(text.encode())


def test_a_card_without_a_fix_is_refused() -> None:
    data = failure(2).to_data()
    data["card"]["fixes"] = []

    with pytest.raises(RankFactsError, match="not whole"):
        failure_of(json.dumps(data).encode())


def test_an_empty_folder_says_what_leaves_reports(tmp_path: Path) -> None:
    with pytest.raises(RankFactsError, match="nbguard run --report"):
        job_report(tmp_path)


def test_a_folder_for_reports_is_made_only_for_one(tmp_path: Path) -> None:
    assert report_folder(tmp_path / "new") == tmp_path / "new"
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(NbguardError, match="is no folder"):
        report_folder(tmp_path / "file")
    with pytest.raises(NbguardError, match="is no folder"):  # one line at once, not at the end of a run of hours
        report_folder(tmp_path / "file" / "reports")


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (None, None, "")),
        ({"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}, (3, 8, "torchrun")),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77"}, (1, 2, "srun")),
    ],
)
def test_a_process_is_known_by_its_launchers_variables(variables: dict[str, str], place: tuple[object, ...]) -> None:
    *found, job = place_of_process(variables)

    assert tuple(found) == place
    assert job == (variables.get("SLURM_JOB_ID") or variables.get("TORCHELASTIC_RUN_ID") or job)
    assert variables or job.endswith(f" {os.getpid()}")


def test_each_error_of_a_process_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that lies where an earlier one was, as in a run of many tests."""
    monkeypatch.setattr(install._State, "report", tmp_path)
    places = set()
    for number in range(4):
        error = ValueError(str(number))
        places.add(id(error))
        install.words(error)
        (file,) = tmp_path.iterdir()
        assert failure_of(file.read_bytes()).error == f"ValueError: {number}"
        file.unlink()
        install.words(error)
        assert not file.exists()
        del error
    assert len(places) < 4
