"""The faults that files of strangers have once set off, each by the number under which it was found, with others of its kind.

`python -m tests.fuzz.faults NUMBER FOLDER` makes the files and looks at them, within bounds.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import pickle
import random
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest

import nbguard
from nbguard.errors import NbguardError, RankFactsError, RunRecordError
from nbguard.training.ranks.analysis.launch_errors import nccl_notes
from nbguard.training.runs.analysis.record import RunCell
from nbguard.training.runs.comparing import compare, save_record
from tests.fuzz.bounds import bound_memory, bound_time, complaints, unescaped
from tests.fuzz.formats import DATA, command, facts_of_rank, shown, sidecar_data, snapshot_data
from tests.fuzz.values import ESCAPES, HTML
from tests.runs import records

_COMMANDS = ("diagnose", "map", "replay", "whatif")


def _commands(file: Path, *commands: str) -> list[str]:
    """Return what commands print of a file."""
    bound_time()
    texts = [text for name in commands or _COMMANDS for _, text in command([name, str(file)], file.parent)]
    assert not any("not enough memory" in text for text in texts)
    return texts


def _refused(call: Callable[[], object], kind: type[NbguardError]) -> str:
    """Return the message with which a call is refused, which is one line; AssertionError if it is not refused."""
    bound_time()
    with pytest.raises(kind) as refused:
        call()
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 1000
    return message


def _diagnosed(*files: Path) -> list[str]:
    """Return all texts that a diagnosis of ranks shows."""
    bound_time()
    diagnosis = nbguard.load_ranks(files)
    texts = [diagnosis.sentence, *(text for fault in diagnosis.faults for text in _texts(astuple(fault)))]
    return [*texts, *(text for place in diagnosis.places for text in _texts(astuple(place))), *_shown(diagnosis)]


def _shown(result: Any) -> list[str]:
    looks = list(shown(result))
    assert unescaped([text for kind, text in looks if kind == "html"]) == []
    return [text for kind, text in looks if kind == "text"]


def _texts(values: Any) -> Iterator[str]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _texts(value)
        elif isinstance(value, str):
            yield value


def _written(file: Path, data: Any) -> Path:
    file.write_text(json.dumps(data), encoding="utf-8")
    return file


def f3_escapes_in_settings(folder: Path) -> None:
    for number, conf in enumerate((ESCAPES, f"max_split_size_mb:{ESCAPES}", f"{ESCAPES}:1", f"backend:{HTML}{ESCAPES}")):
        raw = snapshot_data() | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": conf}}
        assert complaints(_commands(_written(folder / f"{number}.json", raw))) == []


def f7_escapes_in_names(folder: Path) -> None:
    for name in (f"a{ESCAPES}", f"{ESCAPES}.json", f"--{ESCAPES}"):
        (folder / name).write_bytes(b"nothing")
        assert complaints(_commands(folder / name, *_COMMANDS, "profile")) == []
        assert complaints([text for _, text in command(["map", name], folder)]) == []
        assert complaints([_refused(lambda name=name: nbguard.load_ranks([folder / name]), RankFactsError)]) == []
        assert complaints([_refused(lambda name=name: compare(folder / name, folder), RunRecordError)]) == []


def f7_escapes_in_an_error_of_a_magic(folder: Path) -> None:
    del folder
    from IPython.core.error import UsageError

    from nbguard.frontend.notebook.magics.command_line import guarded

    def fail(error: Exception) -> None:
        raise error

    for error in (NbguardError(f"no {ESCAPES}\nforged: line"), ValueError(ESCAPES)):
        with pytest.raises(UsageError) as told:
            guarded("%gpumem", fail, error)
        assert complaints([str(told.value)]) == []
        assert "\n" not in str(told.value)


def f13_escapes_in_facts_of_ranks(folder: Path) -> None:
    texts = {name: f"{name}{ESCAPES}{HTML}" for name in ("stands", "function", "host", "error", "error_place")}
    for rank in range(3):
        data = facts_of_rank() | texts | {"rank": rank, "state": ("running", "raised", "ended")[rank]}
        data |= {"stack": [ESCAPES], "nccl": [ESCAPES]}
        for call in data["calls"]:
            call |= dict.fromkeys(("name", "dtype", "detail", "place"), f"{rank}{ESCAPES}{HTML}")
        _written(folder / f"rank_{rank}", data)
    for number in (1, 2, 3):
        assert complaints(_diagnosed(*sorted(folder.iterdir())[:number])) == []


def f4_a_version_that_is_none(folder: Path) -> None:
    file = _written(folder / "snapshot.json", snapshot_data())
    for version in ("1", "", "x", "2", f"2.13{ESCAPES}", "2.13" + "x" * 10_000, "99999.1", ESCAPES):
        _written(folder / "snapshot.json.nbguard.json", sidecar_data() | {"torch_version": version})
        assert complaints(_commands(file)) == []


def f5_a_device_smaller_than_what_is_reserved(folder: Path) -> None:
    file = _written(folder / "snapshot.json", snapshot_data())
    for totals in ([1], [0], [1] * 100_000, [2**60 - 1], [], [5, 2**60 - 1]):
        for frees in (totals, [0], [2**59]):
            _written(folder / "snapshot.json.nbguard.json", {"nbguard": 1, "totals": totals, "frees": frees})
            assert all(len(text) < 100_000 for text in _commands(file, "diagnose", "map"))


def f8_cells_of_few_letters(folder: Path) -> None:
    rng = random.Random(8)
    cases = [
        *([["\n".join(rng.choices("ab", k=20_000))] for _ in range(2)],),
        *([rng.choices("ab", k=5000) for _ in range(2)],),
        *([[str(number) for number in rng.sample(range(5000), 5000)] for _ in range(2)],),
        *([["x"] * 20_000, ["x"] * 19_999 + ["y"]],),
        *([["\n" * 50_000 + "x"], ["\n" * 50_001 + "x"]],),
    ]
    for number, sources in enumerate(cases):
        files = []
        for side, cells in enumerate(sources):
            made = tuple(RunCell(number=place, source=source, role="made") for place, source in enumerate(cells, 1))
            files.append(save_record(replace(records.run(), cells=made), folder / f"{number}{side}.json"))
        bound_time()
        assert complaints([compare(*files).sentence]) == []


def f9_records_that_cannot_be(folder: Path) -> None:
    good = save_record(records.run(), folder / "good.json")
    for seconds in (10**400, float("inf"), float("nan"), -1, "x", None):
        data = records.run().to_data() | {"seconds": seconds}
        _refused(lambda data=data: nbguard.training.runs.comparing.record_of(data), RunRecordError)
    for outputs in (5, True, 1.5, "x", [5], {"a": 1}, None):
        book = _written(folder / "book.ipynb", {"cells": [{"outputs": outputs}, 5, None]})
        _refused(lambda book=book: compare(good, book), RunRecordError)
    for name in ("~nosuchuser/x", "x" * 5000, "x/" * 5000, "\0", "", ".", "/dev/zero", "/dev/null/x", f"{ESCAPES}" * 100):
        _refused(lambda name=name: compare(good, name), RunRecordError)
    for number in (2**63, 10**400, -1, 1.5):
        data = records.run().to_data()
        data["cells"][0]["number"] = number
        _refused(lambda data=data: compare(good, _written(folder / "bad.json", data)), RunRecordError)


def f10_numbers_of_ranks(folder: Path) -> None:
    dump = (DATA / "ranks" / "skips_before_a_barrier-2-rank_0").read_bytes()
    first = folder / "trace_rank_0"
    first.write_bytes(dump)
    (folder / "trace_rank_20000").write_bytes(dump)
    assert len(_diagnosed(first, folder / "trace_rank_20000")[-2]) < 1 << 20
    for name in ("trace_rank_65536", "trace_rank_999999", "trace_20261127", "trace_rank_1000000000", "t_" + "9" * 200):
        (folder / name).write_bytes(dump)
        _refused(lambda name=name: nbguard.load_ranks([folder / name]), RankFactsError)
    groups = [[str(group), [0, 19_999]] for group in range(3000)]
    for change in ({"world": 65_536}, {"rank": 20_000, "groups": groups}):
        _diagnosed(first, _written(folder / "facts", facts_of_rank() | {"rank": 1} | change))
    for change in ({"world": 1_048_575}, {"rank": 1_048_575}, {"rank": -1}, {"world": 2**70}, {"groups": [["0", [-1]]]}):
        facts = _written(folder / "facts", facts_of_rank() | change)
        _refused(lambda facts=facts: nbguard.load_ranks([facts]), RankFactsError)


def f10_numbers_of_calls(folder: Path) -> None:
    files = []
    for rank in range(2):
        calls = [facts_of_rank()["calls"][0] | {"position": place, "is_done": False} for place in (1, 5, 10**12 + rank, 2**62)]
        files.append(_written(folder / f"rank_{rank}", facts_of_rank() | {"rank": rank, "calls": calls}))
    _diagnosed(*files)
    dump = pickle.loads((DATA / "ranks" / "skips_before_a_barrier-2-rank_0").read_bytes())
    dump["entries"][0]["collective_seq_id"] = dump["entries"][0]["record_id"] = 2**61
    (folder / "trace_rank_2").write_bytes(pickle.dumps(dump))
    _diagnosed(files[0], folder / "trace_rank_2")


def f11_sizes_and_texts_of_dumps(folder: Path) -> None:
    good = pickle.loads((DATA / "ranks" / "skips_before_a_barrier-2-rank_0").read_bytes())
    file = folder / "trace_rank_0"
    layers: list[Any] = ["x"]
    for _ in range(60):
        layers = [layers, layers]
    for change in (
        {"input_sizes": [[2**120] * 60_000]},
        {"input_sizes": [[2**120] * 20_000]},
        {"input_sizes": [[2**62] * 64]},
        {"input_sizes": [["9" * 4000]]},
        {"profiling_name": layers},
        {"process_group": [layers, ""]},
        {"collective_seq_id": "9" * 5000},
        {"frames": [{"filename": "x" * 100_000, "line": 1, "name": "f"}]},
        {"frames": [{"filename": "x", "line": 1e308, "name": "f"}] * 5},
    ):
        dump = good | {"entries": [entry | change for entry in good["entries"]]}
        file.write_bytes(pickle.dumps(dump))
        _refused(lambda: nbguard.load_ranks([file]), RankFactsError)
    frames = [{"filename": "/lib/python3.11/x.py", "line": 1, "name": "f"}] * 5000  # one list, named by each entry
    file.write_bytes(pickle.dumps(good | {"entries": [good["entries"][0] | {"frames": frames}] * 5000}))
    _refused(lambda: nbguard.load_ranks([file]), RankFactsError)


def f12_fields_of_facts(folder: Path) -> None:
    wrong: dict[str, Any] = {"group": [], "dtype": {}, "detail": [1], "place": None, "elements": 1.5, "is_done": 1, "name": 5}
    wrong |= {"position": 2**63, "caller": "nobody"}
    for name, value in wrong.items():
        data = facts_of_rank()
        data["calls"][0][name] = value
        _refused(lambda data=data: nbguard.load_ranks([_written(folder / "facts", data)]), RankFactsError)
    others: dict[str, Any] = {"groups": [["0", [float("inf")]]], "stack": 5, "nccl": {}, "pid": "x", "at": [], "host": None}
    others |= {"state": "asleep", "works": 0, "error_caller": [], "function": 1, "since": 10**400, "more": 1, "calls": [[]]}
    for name, value in others.items():
        data = facts_of_rank() | {name: value}
        _refused(lambda data=data: nbguard.load_ranks([_written(folder / "facts", data)]), RankFactsError)


def f14_logs_of_one_line(folder: Path) -> None:
    del folder
    warning = "NCCL WARN "
    for piece in (
        *("NCCL INFO Channel ", "NCCL INFO Channel 0 via NET/Socket", f"{warning}Call to connect ", f"{warning}ibv_reg_mr"),
        *(f"{warning}Connection closed by peer ", f"{warning}Connection closed by peer <1", f"{warning}Cuda failure '"),
        *(f"{warning}NET/IB : Got completion from peer <1> with status", f"{warning}connect to failed:", "\r", " ", "\n"),
    ):
        for text in (piece * (1_000_000 // len(piece)), warning + piece.removeprefix(warning) * (1_000_000 // len(piece))):
            bound_time()
            assert all(len(note) <= 300 for note in nccl_notes(text))


def f17_tracebacks_of_launches(folder: Path) -> None:
    file = folder / "attempt_0" / "0" / "error.json"
    file.parent.mkdir(parents=True)
    for piece in (" \n", " ", "\n", 'File "', '  File "x", line 1', "a.", "a.b: ", "\t", ': "\\n', 'File "x", line 9\n'):
        more = {"py_callstack": piece * (600_000 // len(piece)), "timestamp": "9" * 4000}
        message = {"message": piece * 100_000, "extraInfo": more}
        _written(file, {"message": message})
        bound_time()
        launch = nbguard.launch_errors(folder)
        assert complaints([launch.sentence, *_shown(launch)]) == []
    for plant in (lambda: file.symlink_to("/dev/zero"), lambda: os.mkfifo(file)):
        file.unlink()
        plant()
        _refused(lambda: nbguard.launch_errors(folder), RankFactsError)


def f18_numbers_of_profiles(folder: Path) -> None:
    for number in (2**63, 2**70, 10**400, -(2**70), 2**63 - 1, -(2**63), 0, -1):
        data = json.loads((DATA / "profile" / "fastai.json").read_bytes())
        for place in ("samples", "points"):
            for row in data["memory"][place]["rows"][-1:]:
                row[:] = [number if type(value) is int else value for value in row]
        printed = _commands(_written(folder / "profile", data), "profile")
        assert complaints(printed) == []
    data = json.loads((DATA / "profile" / "fastai.json").read_bytes())
    zeros = 4_000_000
    data["log"] |= {"marks": zeros, "codes": _packed(2 * zeros), "times": _packed(8 * zeros)}
    printed = _commands(_written(folder / "profile", data), "profile")
    assert "log of phases" in printed[1]


def f18_loops_of_a_profile_that_never_end(folder: Path) -> None:
    data = json.loads((DATA / "profile" / "fastai.json").read_bytes())
    loops = 30_000
    data["log"] |= {"marks": loops, "codes": _packed(2 * loops), "times": _packed(8 * loops)}
    data["log"] |= {"boundaries": loops, "kinds": _packed(loops), "places": _packed(8 * loops)}
    data["log"]["loops"] = base64.b64encode(zlib.compress(array("q", range(loops)).tobytes())).decode()
    printed = _commands(_written(folder / "profile", data), "profile")
    assert printed[0]


def _packed(size: int) -> str:
    packer, block = zlib.compressobj(9), bytes(1 << 20)
    parts = [packer.compress(block[: min(len(block), size - done)]) for done in range(0, size, len(block))]
    return base64.b64encode(b"".join((*parts, packer.flush()))).decode()


FAULTS = {name: call for name, call in globals().items() if name[:1] == "f" and name[1:2].isdigit()}


def main() -> None:
    """Look for one fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    bound_memory()
    bound_time()
    FAULTS[options.fault](options.folder)


if __name__ == "__main__":
    main()
