"""The command line on snapshots, from the golden runs made into files, and on this machine."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import platform
import re
import stat
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
import yaml

from nbguard.errors import SnapshotError
from nbguard.frontend.cli import files, main
from nbguard.frontend.cli.arguments import TERMINAL
from nbguard.memory.allocator.snapshot import reader_process
from nbguard.memory.allocator.snapshot.read import sidecar_data, sidecar_path
from nbguard.memory.allocator.snapshot.snapshot import Sidecar
from nbguard.training.runs.analysis.comparison import compare_records
from nbguard.training.runs.comparing import save_record
from nbguard.units import parse_bytes
from tests.allocator import oracle
from tests.allocator.test_oracle import RUNS
from tests.runs.records import run

ROOT = Path(__file__).resolve().parents[2]
_SVG = "{http://www.w3.org/2000/svg}"
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


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])

    assert (end.value.code, capsys.readouterr().out) == (0, f"nbguard {version('nbguard')}\n")


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
    assert "the spread covers their possible orders" in old
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
        (["lock", "."], ". cannot be read: "),
        (["replay", "."], "nbguard: . cannot be read: "),
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


def test_the_help_has_a_line_for_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    rows = re.findall(r"^  (\w+)  +\w[^\n]+$", shown, re.MULTILINE)

    assert sorted(rows) == sorted(TERMINAL.words)
    assert all(f"{status} " in shown.partition("Exit status:")[2] for status in (0, 1, 2, 3, 130, 141))
    assert max(map(len, shown.splitlines())) <= 120


_MISSING_FILE = "nbguard: nowhere cannot be read: there is no such file"


@pytest.mark.parametrize("command", ["diagnose", "map", "replay", "whatif", "profile", "predict", "lock", "diff"])
def test_all_commands_say_the_same_of_a_file_that_does_not_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["nowhere"] if command != "diff" else ["nowhere", "nowhere"]

    assert main([command, *files]) == 2
    assert capsys.readouterr().err.strip() == _MISSING_FILE


_WITHOUT_TORCH = """
import sys
from nbguard.errors import SnapshotError
from nbguard.frontend.cli import files, main
for line in sys.argv[1:]:
    assert main(line.split()) == 2, line
    assert "torch" not in sys.modules, line
"""


def test_arguments_are_checked_before_pytorch_is_imported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("learn = 1\n")
    (tmp_path / "broken.py").write_text("for")
    (tmp_path / "data.pickle").write_bytes(b"\x80\x04}.")
    (tmp_path / "empty").mkdir()
    lines = [
        "doctor foo",
        "doctor trian:learn",
        "doctor train:lern",
        "doctor train:",
        "doctor broken:learn",
        "doctor empty:learn",
        "doctor --golden outputs.pt",
        "doctor --golden train.py train:learn",
        "doctor --golden nowhere/outputs.pt train:learn",
        "predict broken.py",
        "predict data.pickle",
        f"predict {script} --time nowhere.json",
        f"predict {script} --gpu T4 --price V100=1",
        "predict nofile.py",
        f"predict {script} --gpu foo",
        f"predict {script} --gpu 16",
        f"predict {script} --settings nothing:1",
        f"predict {script} --bs 0",
        f"predict {script} --lagest",
    ]
    command = [sys.executable, "-c", _WITHOUT_TORCH, *lines]

    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})

    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()
    assert len(said) == len(lines)
    assert "did you mean train?" in said[1]
    assert said[2].endswith("train.py has no lern: did you mean learn?")
    assert said[-5].endswith("None of these? Give a size, as in 16GiB (nbguard predict --help says more)")
    assert "did you mean --largest?" in said[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nbguard: say a command, such as  nbguard diagnose --help (nbguard --help says more)"),
        (["diagnoze"], "nbguard: there is no command 'diagnoze': did you mean diagnose?"),
        (["map"], "nbguard map: the following arguments are required: FILE (nbguard map --help says more)"),
        (["map", "FILE", "-n", "0"], "nbguard map: argument -n: '0' is not a number of rows to show"),
        (
            ["diagnose", "FILE", "--fraction", "2"],
            "nbguard diagnose: argument --fraction: '2' is not a fraction; write it as 0.5",
        ),
        (["whatif", "FILE", "--torch", "newest"], "nbguard whatif: argument --torch: "),
        (["diagnose", "FILE", "--jsno"], "nbguard diagnose: unrecognized arguments: --jsno: did you mean --json?"),
        (["doctor", "--strikt"], "nbguard doctor: unrecognized arguments: --strikt: did you mean --strict?"),
        (["completion", "tcs"], "nbguard completion: 'tcs' is not one of bash, zsh, tcsh"),
        (["whatif", "FILE", "--capacity", "16"], "nbguard whatif: argument --capacity: 16 has no unit"),
        (["predict", "FILE", "--gpu", "16"], "nbguard predict: argument --gpu: 16 has no unit"),
        (["predict", "FILE", "--gpu", "RTX309"], "nbguard predict: argument --gpu: no GPU is known as 'RTX309': did you mean"),
        (["predict", "FILE", "--settings", "max_split:3"], "nbguard predict: argument --settings: max_split"),
    ],
)
def test_an_argument_that_is_wrong_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err

    assert error.startswith(said)
    assert error.count("\n") == 1


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system has no /proc")
@pytest.mark.parametrize("command", ["diagnose", "map", "replay", "whatif"])
@pytest.mark.parametrize("file", ["/proc/self/maps", "/proc/self/mem"])
def test_a_file_that_fails_while_it_is_read_is_one_line(command: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, file]) == 2
    out, error = capsys.readouterr()

    assert out == ""
    assert error.startswith("nbguard: ")
    assert Path(file).name in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n", b"\x7fELF\x02\x01\x01", b"\0" * 600, b"hello, world"])
def test_a_file_of_another_kind_is_said_to_be_one(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other"
    file.write_bytes(content)

    assert main(["map", str(file)]) == 2
    assert capsys.readouterr().err == (
        "nbguard: other: not a readable snapshot: it is neither a pickle nor JSON; "
        "torch.cuda.memory._dump_snapshot(FILE) writes one.\n"
    )


def with_settings(folder: Path, settings: str) -> Path:
    """Write a golden run that was recorded under such settings, whatever they are."""
    file = snapshot_file(folder, "2.13.0_118")
    recorded = pickle.loads(file.read_bytes()) | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": settings}}
    file.write_bytes(pickle.dumps(recorded))
    return file


@pytest.mark.parametrize("command", ["replay", "whatif"])
def test_what_contradicts_itself_is_said_with_its_file(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    wrong = with_settings(bad, "garbage").rename(bad / "wrong.pickle")

    assert (
        main([command, str(wrong), str(snapshot_file(good, "2.13.0_118")), *(["--set", ""] if command == "whatif" else [])])
        == 2
    )
    out, error = capsys.readouterr()

    assert error == (
        "nbguard: wrong.pickle: its recorded settings cannot be used: "
        "garbage: settings are written key:value, with a comma between them.\n"
    )
    assert "events reproduced" in out


def test_diagnose_shows_the_rest_of_a_file_whose_settings_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(with_settings(tmp_path, "max_split_size_mb:none"))]) in (0, 1)
    text = capsys.readouterr().out

    assert "cuda:0 cannot be run again, because its recorded settings cannot be used: max_split_size_mb: takes" in text
    assert "Who held the memory" in text


def test_a_file_without_a_device_is_said_to_have_nothing_to_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "empty.pickle"
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))

    assert main(["whatif", str(file)]) == 2
    assert "it holds no device, so there is nothing to run again" in capsys.readouterr().err


def test_it_runs_as_a_module_and_loads_no_library(tmp_path: Path) -> None:
    file = snapshot_file(tmp_path, "2.13.0_118")
    code = f"""
import sys, nbguard.frontend.cli as command
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
    ("text", "size"), [("16GiB", 2**34), ("512 MiB", 2**29), ("80g", 80 * 2**30), ("1.5kb", 1536), ("7B", 7), ("2T", 2**41)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "16 Gigs", "1 2"])
def test_other_words_are_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="write it as"):
        parse_bytes(text)


def test_the_snapshot_of_the_readme_is_diagnosed(capsys: pytest.CaptureFixture[str]) -> None:
    sample = Path(__file__).parents[2] / "notebooks" / "out_of_memory.pickle"

    assert main(["diagnose", str(sample)]) == 1
    assert "max_split_size_mb:128" in capsys.readouterr().out
    assert sample.stat().st_size < 150_000


@pytest.mark.parametrize("command", ["map", "replay", "whatif", "diagnose"])
def test_of_a_large_file_the_state_at_its_end_is_said_before_its_history_is_read(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = {"size": 2 << 20, "requested_size": 2 << 20, "address": 1 << 30, "state": "active_allocated", "frames": []}
    rest = block | {"size": 18 << 20, "address": (1 << 30) + (2 << 20), "state": "inactive"}
    segment = {"device": 1, "address": 1 << 30, "total_size": 20 << 20, "stream": 0, "segment_type": "large"}
    alloc = {"action": "alloc", "addr": 1 << 30, "size": 2 << 20, "stream": 0}
    trace = [alloc | {"time_us": 1 << 50 | number} for number in range(40_000)]
    file = tmp_path / "long.pickle"
    file.write_bytes(pickle.dumps({"segments": [segment | {"blocks": [block, rest]}], "device_traces": [[], trace]}))
    monkeypatch.setattr(files, "_LARGE", 1 << 20)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(reader_process, "read_pickle", Mock(side_effect=SnapshotError("its history")))

    assert main([command, str(file)]) == 2

    said, history = capsys.readouterr().err.splitlines()
    assert said == "nbguard: long.pickle: cuda:1 had 20 MiB reserved, 2 MiB of it in use, at the end"
    assert history.endswith("long.pickle: its history")


def test_gz_is_read_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = snapshot_file(tmp_path, "2.15.0_176", beside=False)
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(pickle.loads(plain.read_bytes())).encode()))

    main(["replay", "--json", "--torch", "2.15", "--capacity", "2500MiB", "--fraction", "0.9", str(plain), str(packed)])
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())

    assert first | {"file": ""} == second | {"file": ""}


def test_diagnose_says_why_it_ran_out_and_what_would_have_helped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = snapshot_file(tmp_path, "2.11.0_49")

    assert main(["diagnose", str(file), "--html", str(tmp_path / "page.html")]) == 1
    text = capsys.readouterr().out
    page = (tmp_path / "page.html").read_text(encoding="utf-8")

    assert re.search(r"cuda:0 ran out of memory: .* was asked for; the device had .* left \(\d+ requests failed", text)
    assert text.index("No setting here helps: request") < text.index("Who held the memory") < text.index("Other settings")
    assert text.count("No setting here helps: request") == 1
    assert "stranded" in text
    assert "<svg" in page
    assert "<script" not in page
    assert not re.search(r"""(?:src|href)=["']?https?:""", page)


@pytest.mark.parametrize(
    ("beside", "options", "cause"),
    [
        (True, [], "This process may take only 0.9 of the device"),
        (False, ["--capacity", "2500MiB", "--fraction", "0.9"], "This process may take only 0.9 of the device"),
        (False, ["--capacity", "2500MiB"], "A limit on this process refused it"),
    ],
)
def test_diagnose_says_why_a_device_that_had_enough_refused(
    beside: bool, options: list[str], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = snapshot_file(tmp_path, "2.11.0_49", beside=beside)

    main(["diagnose", str(file), *options])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "ran out of memory" in line]

    assert "300 MiB was asked for" in line
    assert "the device had 482 MiB left" in line
    assert f". {cause} (torch.cuda.set_per_process_memory_fraction)" in line


def test_diagnose_blames_no_limit_where_the_device_was_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["diagnose", str(snapshot_file(tmp_path, "2.9.1_24"))])

    assert "per_process" not in next(line for line in capsys.readouterr().out.splitlines() if "ran out of memory" in line)


def test_diagnose_as_json_has_all_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = snapshot_file(tmp_path, "2.11.0_49")

    main(["diagnose", "--json", str(file)])
    found = json.loads(capsys.readouterr().out)

    ooms = [
        event for event in oracle.read(next(path for path in RUNS if "2.11.0_49" in path.name))["events"] if event[0] == "oom"
    ]
    assert found["kind"] == "snapshot_diagnosis"
    (refusal,) = found["refusals"]
    assert (refusal["free"], refusal["size"], refusal["refusals"]) == (ooms[0][1], ooms[0][2], len(ooms))
    assert found["trials"][0]["events"] == found["trials"][0]["reproduced"]
    assert found["report"]["kind"] == "saved"
    assert found["map"]["kind"] == "memory_map"


def test_diagnose_of_a_trace_without_a_request_does_not_say_that_none_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch 2.0 keeps one event unless told otherwise, and a snapshot that is taken is an event, too."""
    file = snapshot_file(tmp_path, "2.13.0_118")
    recorded = pickle.loads(file.read_bytes())
    recorded["device_traces"] = [[{"action": "snapshot", "addr": 0, "size": 1 << 30, "stream": 0, "frames": []}]]
    file.write_bytes(pickle.dumps(recorded))

    assert main(["diagnose", str(file)]) == 0
    text = capsys.readouterr().out

    assert "No request failed" not in text
    assert "The recorded history contains no request, so the cause is not known. " in text
    assert "max_entries" in text
    assert main(["whatif", str(file)]) == 0
    assert re.search(r"^  [0-9,]+ blocks in use, and no request after them", capsys.readouterr().out, re.MULTILINE)


def test_diagnose_of_a_run_that_went_well_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = snapshot_file(tmp_path, "2.13.0_111")
    snapshot = pickle.loads(file.read_bytes())
    for trace in snapshot["device_traces"]:
        del trace[next((place for place, event in enumerate(trace) if event["action"] == "oom"), len(trace)) :]
    snapshot["segments"] = []
    file.write_bytes(pickle.dumps({**snapshot, "device_traces": [[] for _ in snapshot["device_traces"]]}))

    assert main(["diagnose", str(file)]) == 0
    assert "The file has no history" in capsys.readouterr().out


def test_compare_says_what_the_magic_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = run(), run(("seeds", "torch", "42"))
    names = [os.fspath(save_record(record, tmp_path / f"{at}.json")) for at, record in enumerate(records)]
    assert main(["compare", *names]) == 0
    assert capsys.readouterr().out.split() == compare_records(*records).mimebundle()["text/plain"].split()
    assert main(["compare", *names, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compare_records(*records).to_data()
    assert main(["compare", names[0], "nowhere"]) == 2
    assert "no file nowhere" in capsys.readouterr().err


def test_map_and_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = snapshot_file(tmp_path, "2.13.0_118"), snapshot_file(tmp_path, "2.11.0_49")

    assert main(["map", str(after), "-n", "3"]) == 0
    shown = capsys.readouterr().out
    assert main(["diff", str(before), str(after), "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)

    assert "pinned by" in shown
    (device,) = changes["devices"]
    for rows, total in (("holders", "allocated"), ("pools", "reserved")):
        assert sum(row["grown"] for row in device[rows]) == device[total]["grown"]


@pytest.mark.parametrize("option", ["--html", "--svg"])
@pytest.mark.parametrize("command", ["map", "diagnose"])
def test_a_page_that_cannot_be_written_is_one_line(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = snapshot_file(tmp_path, "2.13.0_118")

    assert main([command, str(file), option, str(tmp_path)]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["map", "diagnose"])
def test_the_map_is_a_picture_of_its_own(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = snapshot_file(tmp_path, "2.13.0_118"), tmp_path / "map.svg"

    main([command, str(file), "--svg", str(picture), "--json"])
    shown = json.loads(capsys.readouterr().out)
    devices = shown["devices"] if command == "map" else shown["map"]["devices"]
    drawn = ElementTree.parse(picture).getroot()

    (the_map,) = devices
    bars = [float(element.get("data-bytes", 0)) for element in drawn.iter(f"{_SVG}g") if element.get("data-bytes")]
    assert drawn.tag == f"{_SVG}svg"
    assert sum(bars) == the_map["space"]["reserved"]
    assert re.findall(r"var\(--(\w+)", picture.read_text()) != []
    declared = set(re.findall(r"--(\w+):", picture.read_text()))
    assert set(re.findall(r"var\(--(\w+)", picture.read_text())) <= declared
    assert not re.search(r"<script|(?:src|href)=", picture.read_text())


def test_completion_is_a_script_of_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")

    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    assert "diagnose" in script
    assert "complete -" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_no_gpu_is_status_1_and_a_reason(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)

    assert main(["gpus"]) == 1
    assert "nvidia-ml-py is not installed" in capsys.readouterr().out
    assert main(["gpus", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["gpus"] == []


def test_a_lock_names_what_a_notebook_imports_and_what_that_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, notebook = tmp_path / "train.py", tmp_path / "train.ipynb"
    script.write_text("def main():\n    import hypothesis.strategies\n")
    cells = [{"cell_type": "code", "source": ["%load_ext nbguard\n", "!ls\n", "import pytest as test"]}]
    notebook.write_text(json.dumps({"cells": cells}))

    assert main(["lock", str(script)]) == 0
    of_script = capsys.readouterr().out
    assert main(["lock", str(notebook)]) == 0
    of_notebook = capsys.readouterr().out

    assert f"\nhypothesis=={version('hypothesis')}\n" in of_script
    assert f"\nsortedcontainers=={version('sortedcontainers')}\n" in of_script  # that hypothesis needs
    assert "pytest==" not in of_script
    assert f"\npytest=={version('pytest')}\n" in of_notebook
    assert f"\npluggy=={version('pluggy')}\n" in of_notebook
    assert main(["lock", "--conda", str(notebook)]) == 0
    environment = yaml.safe_load(capsys.readouterr().out)
    python, pip, packages = environment["dependencies"]
    assert (environment["name"], environment["channels"], pip) == ("train", ["conda-forge"], "pip")
    assert python == f"python={platform.python_version()}"
    assert packages["pip"] == of_notebook.splitlines()[1:]
    assert main(["lock", str(tmp_path / "nowhere.py")]) == 2
    assert "nowhere.py cannot be read" in capsys.readouterr().err


def test_a_lock_names_the_index_of_the_cuda_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nbguard.training.doctor import lock

    metadata = tmp_path / "madeup-1.0+cu130.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: madeup\nVersion: 1.0+cu130\n")
    (metadata / "top_level.txt").write_text("madeup\n")
    script = tmp_path / "train.py"
    script.write_text("import madeup\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    lines = ["--extra-index-url https://download.pytorch.org/whl/cu130", "madeup==1.0+cu130"]
    assert lock.lock_of([str(script)]).splitlines()[1:] == lines
    assert yaml.safe_load(lock.lock_of([str(script)], conda=True))["dependencies"][-1] == {"pip": lines}


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero here")
@pytest.mark.parametrize("command", ["profile", "diagnose", "map", "replay", "whatif"])
def test_a_file_that_never_ends_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """F6 of the red team: also behind a link, and a pipe that nobody writes to."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")

    assert main([command, "/dev/zero", str(tmp_path / "pipe"), str(tmp_path / "link"), str(tmp_path)]) == 2

    assert len(capsys.readouterr().err.splitlines()) == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("command", ["gpus", "gpus --json", "schema", "schema gpus", "diagnose nothing.pickle"])
@pytest.mark.parametrize(
    ("streams", "status"), [(">/dev/full", 2), (">/dev/full 2>&1", 2), (">&-", None), ("2>&-", None), ("<&- >&- 2>&-", None)]
)
def test_an_output_that_cannot_be_written_is_one_line(command: str, streams: str, status: int | None) -> None:
    """F23 of the red team. A closed stream is no output that somebody wants: the status is the answer then."""
    program = f"{sys.executable} -m nbguard {command}"
    normal = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

    ran = subprocess.run(
        ["bash", "-c", f"{program} {streams}"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )

    assert ran.returncode == (normal.returncode if status is None else status)
    assert "Traceback" not in ran.stderr
    assert len(ran.stderr.splitlines()) <= 1


def test_what_is_opened_does_not_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Else what a library prints, as drivers do, would stand in the file that is just being written."""
    code = (
        "import os, sys; from nbguard.frontend import cli; "
        "cli._run = lambda _: os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY); sys.exit(cli.main())"
    )
    command = f"{sys.executable} -c '{code}' {tmp_path / 'a'} <&- >&- 2>&-"

    assert subprocess.run(["bash", "-c", command], cwd=ROOT, timeout=120, check=False).returncode > 2


@pytest.mark.parametrize("place", ["/dev/null", "no/page.html", "."])
def test_a_page_is_written_to_a_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = snapshot_file(tmp_path, "2.13.0_118")

    assert main(["map", str(file), "--html", place]) == 2

    assert f"nbguard: {place} cannot be written: " in capsys.readouterr().err
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
