"""`python -m nbguard replay` and `whatif`, from the golden runs made into snapshots."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from nbguard.allocator.snapshot.sidecar import sidecar_data, sidecar_path
from nbguard.allocator.snapshot.snapshot import Sidecar
from nbguard.cli import main
from nbguard.units import parse_bytes
from tests.allocator import oracle
from tests.allocator.test_oracle import RUNS

RECORDED = os.environ.get("NBGUARD_RECORDED_DATA", "")
NEEDS_RECORDED = pytest.mark.skipif(not RECORDED, reason="NBGUARD_RECORDED_DATA does not name the folder of recorded snapshots")


def snapshot_file(folder: Path, name: str, *, cut: int = 0, beside: bool = True) -> Path:
    """Write a golden run as PyTorch would have written it, without its first `cut` events."""
    run = oracle.read(next(path for path in RUNS if path.name.startswith(name)))
    file = folder / f"{name}.pickle"
    file.write_bytes(pickle.dumps(oracle.as_snapshot(run, cut)))
    if beside:
        facts = Sidecar(
            torch_version=run["torch"], settings=None, totals=(run["capacity"],), frees=(), fractions=(run["fraction"],)
        )
        sidecar_path(file).write_text(json.dumps(sidecar_data(facts)))
    return file


def test_replay_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = snapshot_file(tmp_path, "2.13.0_118")

    assert main(["replay", "--json", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)

    run = oracle.read(next(path for path in RUNS if path.name.startswith("2.13.0_118")))
    assert found["events"] == found["reproduced"] == len(run["events"])
    assert found["final_blocks_equal"] is True
    assert found["peak_reserved"] == oracle.peak_reserved(run)


def test_replay_says_where_it_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = snapshot_file(tmp_path, "2.11.0_67", beside=False)

    assert main(["replay", str(file)]) == 1
    text = capsys.readouterr().out

    assert "events reproduced (first difference at event" in text
    assert "recorded segment_free" in text


def test_whatif_prints_a_table_and_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = snapshot_file(tmp_path, "2.11.0_49")

    assert main(["whatif", str(file), "--set", "expandable_segments:True,max_split_size_mb:64", "--set", ""]) == 0
    text = capsys.readouterr().out

    assert "events reproduced\n" in text
    assert "defaults (as recorded)" in text
    assert "No setting here helps: request" in text
    assert "must be freed before, whatever the settings" in text or "not in one piece" in text
    assert "is a trap" in text


def test_whatif_shows_the_spread_over_orders_of_addresses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["whatif", "--capacity", "5GiB", str(snapshot_file(tmp_path, "2.11.0_49"))])
    old = capsys.readouterr().out
    main(["whatif", "--capacity", "100GiB", str(snapshot_file(tmp_path, "2.15.0_176"))])
    new = capsys.readouterr().out

    assert " – " in old
    assert "the spread is over orders" in old
    assert " – " not in new


def test_whatif_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = snapshot_file(tmp_path, "2.13.0_111")

    assert main(["whatif", "--json", str(file), "--capacity", "100GiB"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert [row["settings"] for row in found["rows"]][:2] == ["expandable_segments:True", ""]
    assert found["rows"][0]["out_of_memory"] is None
    assert all(row["peak_reserved"] >= row["peak_allocated"] > 0 for row in found["rows"])
    assert found["recommendation"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["replay", "nowhere.pickle"], "there is no such file"),
        (["replay", "."], "this is not a file"),
        (["whatif", "FILE", "--set", "max_split:3"], "max_split: PyTorch has no such allocator setting"),
        (["whatif", "FILE", "--set", "large_segment_size_mb:3"], "large_segment_size_mb: takes a whole number of MiB from 11"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(snapshot_file(tmp_path, "2.13.0_118"))

    assert main([file if argument == "FILE" else argument for argument in arguments]) == 2
    error = capsys.readouterr().err

    assert said in error
    assert error.count("\n") == 1


def test_it_runs_as_a_module_and_loads_no_library(tmp_path: Path) -> None:
    file = snapshot_file(tmp_path, "2.13.0_118")
    code = f"""
import sys, nbguard.cli as command
command.main(['replay', {str(file)!r}])
print('torch' in sys.modules, 'numpy' in sys.modules)
"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = subprocess.run([sys.executable, "-m", "nbguard", "--help"], capture_output=True, text=True, check=True)

    assert done.stdout.endswith("False False\n")
    assert "replay" in shown.stdout


@NEEDS_RECORDED
def test_recorded_runs_are_reproduced_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(map(str, Path(RECORDED).glob("*.json.gz")))
    assert files

    assert main(["replay", "--json", *files]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [each["reproduced"] for each in found] == [each["events"] for each in found]
    assert all(each["final_blocks_equal"] for each in found)
    assert sum(each["events"] for each in found) > 50_000


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 2**34), ("512 MiB", 2**29), ("80g", 80 * 2**30), ("1.5kb", 1536), ("7", 7), ("2T", 2**41)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "16 Gigs", "1 2"])
def test_other_words_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="write it as"):
        parse_bytes(text)


def test_gz_is_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = snapshot_file(tmp_path, "2.15.0_176", beside=False)
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(pickle.loads(plain.read_bytes())).encode()))

    main(["replay", "--json", "--torch", "2.15", "--capacity", "2500MiB", "--fraction", "0.9", str(plain), str(packed)])
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())

    assert first | {"file": ""} == second | {"file": ""}
