"""The formats that nbguard reads from strangers: of each a way to make files by a seed, and to look at them as a user would."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import os
import pickle
import pickletools
import random
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nbguard
from nbguard.errors import DamagedDataError, NbguardError, RankFactsError, RunRecordError
from nbguard.frontend.cli import main
from nbguard.frontend.cluster.analysis import engine_of, report_of
from nbguard.frontend.gpu_leaks.results import GpuLeaks, HeldMemory, MemoryOfTest
from nbguard.frontend.gpu_leaks.summary import comment_on, read_result
from nbguard.frontend.sidebar.protocol.messages import BadRequest, parse
from nbguard.render.result import Result
from nbguard.training.ranks.analysis.facts import CollectiveCall, RankFacts, to_text
from nbguard.training.ranks.analysis.launch_errors import nccl_notes
from nbguard.training.runs.comparing import compare
from tests.allocator import oracle
from tests.fuzz.values import ESCAPES, HTML, TEXTS, changed, damaged, repeated
from tests.jobs.test_failures import failure
from tests.runs import records

DATA = Path(__file__).parents[1] / "data"
CANARY = "it ran"
"""The name of the folder that a bomb makes."""
Look = Iterator[tuple[str, str]]
"""(kind of the text, the text): `text` is for a terminal, `html` for a page, `refused` is the message of an error."""


@dataclass(frozen=True, slots=True)
class Format:
    """A format, and how it is read."""

    make: Callable[[random.Random, Path], None]  # writes files into a folder
    look: Callable[[random.Random, Path], Look]  # at them; an error that is not documented is raised
    files: int = 40  # that an ordinary run makes


# --- snapshots --------------------------------------------------------------------------------------------------------------

_FRAME = {"filename": f"/home/{HTML}/train.py", "line": 31, "name": f"forward{ESCAPES}"}


def sidecar_data() -> dict[str, Any]:
    """Return a valid sidecar."""
    return {
        "nbguard": 1,
        "torch_version": "2.13.0",
        "settings": "max_split_size_mb:64",
        "totals": [2**34],
        "frees": [2**33],
        "fractions": [1.0],
        "names": ["NVIDIA A"],
    }


def snapshot_data() -> Any:
    """Return a valid snapshot, as JSON has it."""
    run = oracle.read(next(iter(sorted((DATA / "oracle").glob("2.13*.gz")))))
    run["events"] = run["events"][-40:]
    raw = oracle.as_snapshot(run)
    for event in raw["device_traces"][0]:
        event["frames"] = [_FRAME]
    for block in raw["segments"][0]["blocks"]:
        block["frames"] = [_FRAME]
    return json.loads(json.dumps(raw))


class Bomb:
    """An object whose pickle makes a folder where it is read by Python."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (self.mark,)


def _name(rng: random.Random, ending: str) -> str:
    return rng.choice(("snapshot", "snapshot", "snapshot", f"a{ESCAPES}", HTML.replace("/", "_"), "--set", "x" * 200)) + ending


def _make_snapshot(rng: random.Random, folder: Path) -> None:
    raw = changed(snapshot_data(), rng)
    content = json.dumps(raw).encode() if rng.random() < 0.5 else pickle.dumps(raw, rng.randrange(6))
    (folder / _name(rng, ".pickle")).write_bytes(damaged(content, rng) if rng.random() < 0.2 else content)


def _make_sidecar(rng: random.Random, folder: Path) -> None:
    file = folder / "snapshot.pickle"
    file.write_bytes(pickle.dumps(snapshot_data()))
    content = json.dumps(changed(sidecar_data(), rng)).encode()
    file.with_name(f"{file.name}.nbguard.json").write_bytes(damaged(content, rng) if rng.random() < 0.2 else content)


def _make_opcodes(rng: random.Random, folder: Path) -> None:
    mark = str(folder / CANARY)
    opcodes = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]
    bomb = pickle.dumps(Bomb(mark), rng.randrange(6))
    tails = (
        b"",
        b"\x02",
        b"\xff\xff\xff\x7f",
        b"\x08\x00\x00\x00segments",
        b"cos\nmkdir\n",
        f"(V{mark}\nt".encode(),
        b"R",
        bomb[:-1],
    )
    match rng.randrange(3):
        case 0:
            content = pickle.dumps(snapshot_data() | {"extra": Bomb(mark)}, rng.randrange(6))
        case 1:
            content = b"\x80\x04" + b"".join(rng.choice(opcodes) + rng.choice(tails) for _ in range(rng.randrange(30))) + b"."
        case _:
            whole = pickle.dumps(snapshot_data(), rng.randrange(6))
            place = rng.randrange(2, len(whole))
            content = whole[:place] + rng.choice(opcodes) + rng.choice(tails) + whole[place:]
    if rng.random() < 0.1:  # the other reader has those of more than 1 MiB
        content = b"\x80\x04X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20) + b"0" + content.removeprefix(b"\x80\x04")
    (folder / "snapshot.pickle").write_bytes(content)


def _make_archive(rng: random.Random, folder: Path) -> None:
    content = json.dumps(snapshot_data()).encode()
    match rng.randrange(7):
        case 0:
            packed = gzip.compress(damaged(content, rng))
        case 1:
            packed = damaged(gzip.compress(content), rng)
        case 2:
            packed = gzip.compress(gzip.compress(content))
        case 3:
            packed = gzip.compress(content) + rng.randbytes(20)
        case 4:
            packed = b"".join(gzip.compress(b" ", 1) for _ in range(2000)) + gzip.compress(content)
        case 5:
            packed = rng.choice((bz2.compress(content), gzip.compress(b" " * (80 << 20), 1)))
        case _:
            whole = io.BytesIO()
            with zipfile.ZipFile(whole, "w") as archive:
                archive.writestr(f"../../{ESCAPES}", content)
            packed = whole.getvalue()
    (folder / _name(rng, ".pickle.gz")).write_bytes(packed)


def _look_by_commands(rng: random.Random, folder: Path) -> Look:
    file = next(each for each in sorted(folder.iterdir()) if not each.name.endswith(".nbguard.json"))
    name, page, picture = str(file), str(folder / "page.html"), str(folder / "map.svg")
    words = {"diagnose": [name, "--html", page, "--svg", picture], "diff": [name, name]}
    chosen = rng.choice(("diagnose", "diagnose", "map", "replay", "whatif", "diff"))
    as_json = ["--json"] if rng.random() < 0.2 else []
    yield from command([chosen, *words.get(chosen, [name]), *as_json], folder)
    for written in (page, picture):
        with contextlib.suppress(FileNotFoundError):
            yield "html", Path(written).read_text(encoding="utf-8")


def command(words: list[str], folder: Path) -> Look:
    """Yield what a command prints in a folder."""
    out, err = io.StringIO(), io.StringIO()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(words)
            except SystemExit as end:
                status = int(str(end.code))
    finally:
        os.chdir(before)
    assert status in (0, 1, 2), status
    yield "text", out.getvalue()
    yield "refused" if status == 2 else "text", err.getvalue()


# --- ranks ------------------------------------------------------------------------------------------------------------------


def facts_of_rank() -> Any:
    """Return valid facts of a rank, as JSON has them."""
    calls = tuple(
        CollectiveCall(
            group="0", position=at, name="all_reduce", elements=4, dtype="float32", place=f"train.py:{at}", is_done=at < 4
        )
        for at in range(1, 5)
    )
    facts = RankFacts(
        rank=0,
        world=3,
        host="here",
        pid=9,
        state="running",
        calls=calls,
        groups=(("0", (0, 1, 2)),),
        stands="train.py:9",
        function="step",
        stack=("train.py:9 in step()",),
        since=3.0,
        error="",
        nccl=("a note",),
    )
    return json.loads(to_text(facts))


def _make_facts(rng: random.Random, folder: Path) -> None:
    for rank in range(rng.choice((1, 2, 3))):
        data = facts_of_rank() | {"rank": rank}
        content = json.dumps(changed(data, rng) if rng.random() < 0.7 else data).encode()
        (folder / f"rank_{rank}").write_bytes(damaged(content, rng) if rng.random() < 0.1 else content)


def _make_dump(rng: random.Random, folder: Path) -> None:
    for rank in range(2):
        content = (DATA / "ranks" / f"skips_before_a_barrier-2-rank_{rank}").read_bytes()
        if rng.random() < 0.7:
            content = pickle.dumps(changed(pickle.loads(content), rng))
        name = rng.choice(
            (f"trace_rank_{rank}",) * 4 + ("trace_rank_999", "trace_20261127", "rank_" + "9" * 40, f"a{ESCAPES}_3")
        )
        (folder / name).write_bytes(damaged(content, rng) if rng.random() < 0.2 else content)


def _look_at_ranks(rng: random.Random, folder: Path) -> Look:
    del rng
    try:
        diagnosis = nbguard.load_ranks(sorted(folder.iterdir()))
    except RankFactsError as error:
        yield "refused", str(error)
        return
    yield "text", diagnosis.sentence
    yield from shown(diagnosis)


_STACK = """Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/torch/nn/modules/module.py", line 1790, in _call_impl
    return forward_call(*args, **kwargs)
  File "/home/me/train.py", line 12, in train
ValueError: a broken image
"""


def _make_launch_errors(rng: random.Random, folder: Path) -> None:
    for rank in rng.choice(([0], [0, 1], [0, 1, 12345678])):
        stack = repeated(_STACK, rng) if rng.random() < 0.6 else _STACK
        message = {"message": stack[-200:], "extraInfo": {"py_callstack": stack, "timestamp": "1700000000"}}
        file = folder / "attempt_0" / str(rank) / "error.json"
        file.parent.mkdir(parents=True)
        content = json.dumps(changed({"message": message}, rng)).encode()
        file.write_bytes(damaged(content, rng) if rng.random() < 0.1 else content)


def _look_at_launch_errors(rng: random.Random, folder: Path) -> Look:
    del rng
    try:
        launch = nbguard.launch_errors(folder)
    except RankFactsError as error:
        yield "refused", str(error)
        return
    yield "text", launch.sentence
    yield from shown(launch)


_LOG = """h:9:10 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
h:9:10 [0] init.cc:9 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1a0
h:9:10 [0] x.cc:9 NCCL WARN Call to connect returned Connection refused, retrying
h:9:10 [0] x.cc:9 NCCL WARN NET/IB : Got completion from peer 10.0.0.1<1234> with status=12 opcode=0
h:9:10 [0] x.cc:9 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory
h:9:10 [0] x.cc:9 NCCL WARN Cuda failure 2 'out of memory'
"""


def _make_log(rng: random.Random, folder: Path) -> None:
    (folder / "log").write_text(repeated(_LOG, rng)[: 1 << 20] + rng.choice(TEXTS), encoding="utf-8", errors="surrogatepass")


def _look_at_log(rng: random.Random, folder: Path) -> Look:
    del rng
    for note in nccl_notes((folder / "log").read_bytes().decode("utf-8", "replace")):
        yield "text", note


# --- runs -------------------------------------------------------------------------------------------------------------------


def _make_records(rng: random.Random, folder: Path) -> None:
    for number in range(2):
        data = changed(records.run().to_data(), rng)
        for cell in data["cells"] if isinstance(data.get("cells"), list) else ():
            if isinstance(cell, dict) and rng.random() < 0.3:
                cell["source"] = "\n".join(rng.choices("ab", k=rng.choice((3, 4000))))
        (folder / f"{number}.json").write_text(json.dumps(data), encoding="utf-8")


def _make_notebooks(rng: random.Random, folder: Path) -> None:
    output = {"output_type": "display_data", "metadata": {"nbguard_run": records.run().to_data()}, "data": {}}
    cells = [{"cell_type": "code", "source": ["learn.fit(1)"], "outputs": [output], "metadata": {}}, {"cell_type": "markdown"}]
    for number in range(2):
        content = json.dumps(changed({"cells": cells, "metadata": {}, "nbformat": 4}, rng)).encode()
        (folder / f"{number}.json").write_bytes(damaged(content, rng) if rng.random() < 0.1 else content)


def _look_at_runs(rng: random.Random, folder: Path) -> Look:
    first, second = (str(folder / f"{number}.json") for number in range(2))
    odd = ("~nosuchuser/x", "x" * 5000, "\0", f"{ESCAPES}", "/dev/zero", str(folder))
    try:
        comparison = compare(first, second if rng.random() < 0.9 else rng.choice(odd))
    except RunRecordError as error:
        yield "refused", str(error)
        return
    yield "text", comparison.sentence
    yield from shown(comparison)


def engine_facts() -> dict[str, Any]:
    """Return valid facts of an engine of a cluster."""
    device = {
        "device": "cuda:0",
        "name": f"A{HTML}",
        "uuid": "GPU-1",
        "allocated": 9,
        "reserved": None,
        "holder": "x",
        "held": 9,
    }
    return {"host": "here", "pid": 9, "visible": None, "devices": [device, device], "stale": 4, "error": f"ValueError{ESCAPES}"}


def _make_engines(rng: random.Random, folder: Path) -> None:
    (folder / "engines.json").write_text(json.dumps([changed(engine_facts(), rng) for _ in range(2)]), encoding="utf-8")


def _look_at_engines(rng: random.Random, folder: Path) -> Look:
    del rng
    try:
        sent = json.loads((folder / "engines.json").read_text(encoding="utf-8"))
        report = report_of([engine_of(number, facts) for number, facts in enumerate(sent)])
    except DamagedDataError as error:
        yield "refused", str(error)
        return
    yield from shown(report)


_SOURCE = "%load_ext nbguard\nimport os, re\nfrom json import dumps\n!pip install x\nx = [1, (2, 3)]\n"


def _make_source(rng: random.Random, folder: Path) -> None:
    text = repeated(_SOURCE, rng) if rng.random() < 0.5 else _SOURCE + rng.choice((*TEXTS, "(" * 5000, "-" * 100_000 + "1"))
    if rng.random() < 0.5:
        cell = {"cell_type": "code", "source": text.splitlines(keepends=True)[:3000]}
        text = json.dumps(changed({"cells": [cell, {"cell_type": "markdown"}]}, rng))
    file = folder / f"a{rng.choice((ESCAPES, ''))}\nevil==1{rng.choice(('.py', '.ipynb'))}"
    file.write_text(text, encoding="utf-8", errors="surrogatepass")


def _look_at_source(rng: random.Random, folder: Path) -> Look:
    file = str(next(folder.iterdir()))
    form = rng.choice(("text", "github", "json", "sarif"))
    for kind, text in (*command(["lock", file], folder), *command(["lint", file, "--output-format", form], folder)):
        assert "evil==1" not in text.splitlines()
        yield kind, text


# --- profiles, panels -------------------------------------------------------------------------------------------------------


def _make_profile(rng: random.Random, folder: Path) -> None:
    data = json.loads((DATA / "profile" / rng.choice(("loop.json", "fastai.json"))).read_bytes())
    content = json.dumps(changed(data, rng)).encode()
    (folder / "profile").write_bytes(damaged(content, rng) if rng.random() < 0.1 else content)


def _look_at_profile(rng: random.Random, folder: Path) -> Look:
    yield from command(["profile", str(folder / "profile"), *(["--json"] if rng.random() < 0.2 else ())], folder)


def gpu_leaks_data() -> dict[str, Any]:
    """Return a valid file of `pytest --gpu-leaks-json`."""
    leak = HeldMemory(holder="tests/test_x.py: CACHE[3]", nbytes=2 << 20, storages=1, line="test_x.py:4 in f()", fixture="bag")
    test = MemoryOfTest(test="tests/test_x.py::test_a", file="tests/test_x.py", line=4, leaks=(leak,), peak=3 << 20, limit=5)
    return GpuLeaks(tracked="cpu", minimum=1 << 20, judged=3, tests=(test,)).to_data()


def _make_gpu_leaks(rng: random.Random, folder: Path) -> None:
    content = json.dumps(changed(gpu_leaks_data(), rng)).encode()
    (folder / "leaks").write_bytes(damaged(content, rng) if rng.random() < 0.1 else content)


def _look_at_gpu_leaks(rng: random.Random, folder: Path) -> Look:
    del rng
    try:
        result = read_result((folder / "leaks").read_bytes(), "leaks")
    except NbguardError as error:
        yield "refused", str(error)
        return
    yield from shown(result)
    yield "text", comment_on(result, result)
    yield "text", comment_on(result, None)


def _make_reports(rng: random.Random, folder: Path) -> None:
    content = json.dumps(changed(failure(2).to_data(), rng)).encode()
    file = folder / f"rank-2{rng.choice((ESCAPES, ''))}.failure.json"
    file.write_bytes(damaged(content, rng) if rng.random() < 0.1 else content)


def _look_at_reports(rng: random.Random, folder: Path) -> Look:
    yield from command(["report", str(folder), *(["--json"] if rng.random() < 0.2 else ())], folder)


_MESSAGES = (
    {"op": "hello", "client": "a1", "visible": True, "boot": "b", "heap": 1, "glance": False},
    {"op": "plan", "rid": "r", "action": "release", "heap": 1, "ids": [1, 2], "names": ["x"], "keep": ["k"]},
    {"op": "apply", "rid": "r", "token": "t"},
    {"op": "history", "rid": "r", "seconds": 60},
    {"op": "why", "rid": "r", "heap": 1, "id": 2},
)


def _make_message(rng: random.Random, folder: Path) -> None:
    (folder / "message").write_bytes(pickle.dumps(changed(rng.choice(_MESSAGES), rng)))


def _look_at_message(rng: random.Random, folder: Path) -> Look:
    del rng
    read: Any = parse(pickle.loads((folder / "message").read_bytes()))
    if read is None:
        return
    yield "refused" if type(read) is BadRequest else "text", repr(read)
    for value in asdict(read).values():  # of the types and sizes that the protocol says
        texts = value if isinstance(value, (tuple, list)) else [value]
        assert len(texts) <= 200
        assert all(type(text) in (str, int, bool, type(None)) and len(str(text)) <= 300 for text in texts)


def shown(result: Result) -> Look:
    """Yield what a result shows."""
    bundle = result.mimebundle()
    yield "text", bundle["text/plain"]
    yield "html", bundle["text/html"]
    yield "text", json.dumps(result.to_data())


FORMATS = {
    "snapshots": Format(_make_snapshot, _look_by_commands, files=25),
    "sidecars": Format(_make_sidecar, _look_by_commands, files=25),
    "opcodes": Format(_make_opcodes, _look_by_commands, files=25),
    "archives": Format(_make_archive, _look_by_commands, files=10),
    "facts of ranks": Format(_make_facts, _look_at_ranks, files=100),
    "flight dumps": Format(_make_dump, _look_at_ranks),
    "launch errors": Format(_make_launch_errors, _look_at_launch_errors),
    "NCCL logs": Format(_make_log, _look_at_log),
    "records": Format(_make_records, _look_at_runs),
    "engines": Format(_make_engines, _look_at_engines, files=100),
    "notebooks": Format(_make_notebooks, _look_at_runs),
    "sources": Format(_make_source, _look_at_source, files=4),
    "profiles": Format(_make_profile, _look_at_profile, files=30),
    "leaks of tests": Format(_make_gpu_leaks, _look_at_gpu_leaks, files=100),
    "reports of jobs": Format(_make_reports, _look_at_reports, files=100),
    "messages": Format(_make_message, _look_at_message, files=300),
}
