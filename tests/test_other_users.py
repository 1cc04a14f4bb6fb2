"""What another user of the machine plants: nothing of this user's is written, removed, read out or waited for in vain.

The attacks were found by red teams; each is made with two real users where the tests run as root.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbguard.training.ranks.rank_file import RankFile, job_folder, leave
from tests.other_users import ATTACKER, ROOT, VICTIM, file_of, folder_of, link_of, needs_root, run_as

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="users and permissions of POSIX")

OLD = 2 * 24 * 3600
THESIS = "ten years of work"
_BOARD = "from nbguard.training.ranks.job_board import open_board\nfrom nbguard.training.ranks.rank import Rank"
_JOB = "open_board(Rank(0, 2)).release()"


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.fixture
def shared(open_tmp_path: Path) -> Path:
    """A folder for temporary files that everybody may write to, without the sticky bit: what is in it may be renamed."""
    return folder_of(os.getuid(), open_tmp_path / "shared", 0o777)


@pytest.fixture
def home(open_tmp_path: Path) -> Path:
    """The victim's home folder, with old files in it."""
    home = folder_of(VICTIM, open_tmp_path / "home", 0o700) if os.getuid() == 0 else open_tmp_path / "home"
    home.mkdir(mode=0o700, exist_ok=True)
    for name in ("id_rsa", "known_hosts", "0-1.rank", "thesis.txt"):
        if os.getuid() == 0:
            file_of(VICTIM, home / name, THESIS, OLD)
        else:
            (home / name).write_text(THESIS)
            os.utime(home / name, (0, 0))
    return home


def is_whole(home: Path) -> bool:
    """Say whether the victim's home folder is as it was."""
    return {file.name: file.read_text() for file in home.iterdir()} == dict.fromkeys(
        ("id_rsa", "known_hosts", "0-1.rank", "thesis.txt"), THESIS
    )


# --- the folder of the ranks ------------------------------------------------------------------------------------------------


@needs_root
def test_a_planted_link_has_no_files_of_the_victims_removed(shared: Path, home: Path) -> None:
    """F1 of the red team."""
    link_of(ATTACKER, shared / f"nbguard-ranks-{VICTIM}-evil", home)

    run_as(VICTIM, _JOB, imports=_BOARD, TMPDIR=str(shared), XDG_RUNTIME_DIR="")

    assert is_whole(home)
    assert names_in(shared) == [f"nbguard-ranks-{VICTIM}-evil"]


@needs_root
def test_a_planted_pipe_keeps_no_job_waiting(shared: Path) -> None:
    """F2 of the red team."""
    planted = folder_of(ATTACKER, shared / f"nbguard-ranks-{VICTIM}-x")
    os.mkfifo(planted / "0-1.rank")
    (planted / "0-1.rank").chmod(0o666)
    os.utime(planted / "0-1.rank", (0, 0))

    run_as(VICTIM, _JOB, imports=_BOARD, TMPDIR=str(shared), XDG_RUNTIME_DIR="")

    assert names_in(planted) == ["0-1.rank"]


@needs_root
@pytest.mark.parametrize("what", ["link to a folder", "link to nothing", "folder", "open folder", "file", "pipe"])
@pytest.mark.parametrize("has_runtime_folder", [False, True])
def test_a_folder_that_is_squatted_is_not_used(
    shared: Path, home: Path, open_tmp_path: Path, what: str, has_runtime_folder: bool
) -> None:
    runtime = folder_of(VICTIM, open_tmp_path / "runtime", 0o700)
    variables = {"TMPDIR": str(shared), "XDG_RUNTIME_DIR": str(runtime) if has_runtime_folder else "", "MASTER_PORT": "7"}
    name = Path(run_as(VICTIM, "print(job_folder())", imports=_FOLDER, **variables).strip()).name
    for left in (shared / name, runtime / name):
        if left.is_symlink():
            left.unlink()
        elif left.exists():
            left.rmdir()
    planted = shared / name
    if what.startswith("link"):
        link_of(ATTACKER, planted, home if "folder" in what else home / "new")
    elif "folder" in what:
        folder_of(ATTACKER, planted, 0o777 if "open" in what else 0o755)
    elif what == "file":
        file_of(ATTACKER, planted, "")
    else:
        os.mkfifo(planted)

    said = run_as(VICTIM, _TRIED, imports=_BOARD, **variables)

    assert said.strip() == ("a board" if has_runtime_folder else "refused")
    assert is_whole(home)
    assert names_in(shared) == [name]
    assert names_in(runtime) == []


_FOLDER = "from nbguard.training.ranks.rank_file import job_folder, leave"
_TRIED = """
try:
    open_board(Rank(0, 2)).release()
except OSError:
    print("refused")
else:
    print("a board")
"""


@needs_root
def test_a_folder_that_is_exchanged_meanwhile_is_not_written_to(shared: Path, home: Path) -> None:
    code = f"""
board = open_board(Rank(0, 2))
(folder,) = Path({str(shared)!r}).iterdir()
print(folder.name, flush=True)
folder.rename(folder.with_name("moved"))  # as who may write to the folder around can
folder.symlink_to({str(home)!r})
board.clean()
board.others()
board.release()
"""

    name = run_as(VICTIM, code, imports=_BOARD, TMPDIR=str(shared), XDG_RUNTIME_DIR="").strip()

    assert is_whole(home)
    assert names_in(shared) == ["moved", name]


@needs_root
def test_root_is_no_other_users_victim(shared: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    link_of(ATTACKER, shared / "nbguard-ranks-0-evil", home)
    planted = folder_of(ATTACKER, shared / "nbguard-ranks-0-x", 0o700)
    file_of(ATTACKER, planted / "0-1.rank", "", OLD)

    leave(job_folder())

    assert is_whole(home)
    assert names_in(planted) == ["0-1.rank"]


def _dead_rank(path: Path) -> None:
    """Write the file of a rank whose process has died."""
    RankFile.create(path).close()
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    data = path.read_bytes()
    path.write_bytes(data[:8] + struct.pack("<q", dead.pid) + data[16:])
    os.utime(path, (0, 0))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, alone in which jobs meet."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "what",
    [
        "pipe.rank",
        "link.rank",
        "folder.rank",
        "notes.txt",
        "empty.rank",
        "foreign.rank",
        "fresh.rank",
        "alive.rank",
        "readable",
    ],
)
def test_a_folder_with_anything_but_files_of_dead_ranks_stays(place: Path, what: str) -> None:
    """The rules of the sweep, by one user: whatever is no old file of a dead rank's keeps its folder."""
    (place / "thesis.txt").write_text(THESIS)
    folder = place / f"nbguard-ranks-{os.getuid()}-left"
    folder.mkdir(mode=0o700)
    _dead_rank(folder / "0-1.rank")
    file = folder / what
    if what == "pipe.rank":
        os.mkfifo(file)
    elif what == "link.rank":
        file.symlink_to(place / "thesis.txt")
    elif what == "folder.rank":
        file.mkdir()
    elif what in ("notes.txt", "empty.rank", "foreign.rank"):
        file.write_text("" if what == "empty.rank" else THESIS)
        os.utime(file, (0, 0))
    elif what == "fresh.rank":
        _dead_rank(file)
        os.utime(file)
    elif what == "alive.rank":
        RankFile.create(file).close()
        os.utime(file, (0, 0))
    else:
        folder.chmod(0o755)
    before = names_in(folder)

    leave(job_folder())

    assert names_in(folder) == before
    assert (place / "thesis.txt").read_text() == THESIS


def test_a_folder_with_files_of_dead_ranks_alone_goes(place: Path) -> None:
    folder = place / f"nbguard-ranks-{os.getuid()}-left"
    folder.mkdir(mode=0o700)
    for name in ("0-1.rank", "1-1.new"):
        _dead_rank(folder / name)

    leave(job_folder())

    assert names_in(place) == []


def test_a_link_of_the_users_own_is_not_gone_through(place: Path, home: Path) -> None:
    link = place / f"nbguard-ranks-{os.getuid()}-link"
    link.symlink_to(home)

    leave(job_folder())

    assert is_whole(home)
    assert link.is_symlink()


# --- ranks find each other --------------------------------------------------------------------------------------------------

_RANK = """
import os, sys
from nbguard.training.ranks.job_board import open_board
from nbguard.training.ranks.rank import Rank
board = open_board(Rank(int(sys.argv[1]), 2))
print(flush=True)
for line in sys.stdin:
    if line == "others\\n":
        print(*board.others(), flush=True)
    else:
        board.release()
        print(flush=True)
"""


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """A user's runtime folder."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    return tmp_path / "runtime"


class _Rank:
    """A process that takes part in a job."""

    def __init__(self, rank: int, place: Path, runtime: Path | None) -> None:
        variables = {"TMPDIR": str(place), "MASTER_PORT": "8", "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        if runtime is not None:
            variables["XDG_RUNTIME_DIR"] = str(runtime)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank)], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.answer()

    def ask(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ranks() -> Iterator[list[_Rank]]:
    made: list[_Rank] = []
    yield made
    for rank in made:
        rank.end()


@pytest.mark.parametrize("has", [(True, True), (True, False), (False, True), (False, False)])
def test_ranks_meet_whichever_of_them_have_the_variable(
    tmp_path: Path, runtime: Path, ranks: list[_Rank], has: tuple[bool, bool]
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()

    for number, has_it in enumerate(has):
        ranks.append(_Rank(number, place, runtime if has_it else None))

    assert [rank.ask("others") for rank in ranks] == ["1", "0"]
    assert len(names_in(runtime)) == has[0]
    for rank in ranks:
        rank.ask("release")
    assert names_in(place) == names_in(runtime) == []


def test_a_runtime_folder_that_is_not_private_is_not_used(tmp_path: Path, runtime: Path, ranks: list[_Rank]) -> None:
    """As after `su`, which keeps the variable; or as where an image sets it to a folder for all."""
    place = tmp_path / "temporary"
    place.mkdir()
    runtime.chmod(0o755)

    ranks += [_Rank(0, place, runtime), _Rank(1, place, None)]

    assert [rank.ask("others") for rank in ranks] == ["1", "0"]
    assert names_in(runtime) == []


@needs_root
def test_another_users_runtime_folder_is_not_used(tmp_path: Path, ranks: list[_Rank]) -> None:
    place, theirs = tmp_path / "temporary", folder_of(VICTIM, tmp_path / "theirs", 0o700)
    place.mkdir()

    ranks += [_Rank(0, place, theirs), _Rank(1, place, None)]

    assert [rank.ask("others") for rank in ranks] == ["1", "0"]
    assert names_in(theirs) == []


def test_the_link_of_a_job_that_was_killed_is_swept(tmp_path: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("MASTER_PORT", "1")
    left = job_folder()
    _dead_rank(left / "0-1.rank")
    os.utime(place / left.name, (0, 0), follow_symlinks=False)
    monkeypatch.setenv("MASTER_PORT", "2")

    leave(job_folder())

    assert names_in(place) == names_in(runtime) == []


# --- files that are written -------------------------------------------------------------------------------------------------

_SINKS = "import importlib.metadata, prometheus_client\nfrom nbguard.training.profiler.sinks import open_sink"
_WRITERS = {
    "a run record": (
        "from nbguard.training.runs.comparing import save_record\nfrom tests.runs.records import run",
        "save_record(run(), path)",
    ),
    "a profile": ("from nbguard.training.profiler.files import write_json", "write_json(path, {})"),
    "a page": ("from nbguard.frontend.cli.files import _write", "_write(str(path), 'x')"),
    "a snapshot": ("from nbguard.memory.snapshots.save import _write", "_write(path, b'x', '{}')"),
    "a table": (_SINKS, "open_sink(f'csv:{path}').log('title', ())"),
    "Prometheus' file": (_SINKS, "open_sink(f'prometheus:{path}').log('title', ())"),
}


@needs_root
@pytest.mark.parametrize("what", _WRITERS)
@pytest.mark.parametrize("planted", ["run.json", "run.json.nbguard.json", "run.json.tmp"])
def test_nothing_is_written_through_a_planted_link(shared: Path, home: Path, what: str, planted: str) -> None:
    """F21 of the red team: the target, what lies beside it, and a name that temporary files used to have."""
    imports, act = _WRITERS[what]
    link_of(ATTACKER, shared / planted, home / "thesis.txt")
    code = f"""
path = Path({str(shared)!r}) / "run.json"
try:
    {act}
except NbguardError as error:
    print(error)
"""

    said = run_as(VICTIM, code, imports=f"from nbguard.errors import NbguardError\n{imports}")

    is_hit = planted == "run.json" or (what == "a snapshot" and planted.endswith(".nbguard.json"))
    assert len(said.splitlines()) == is_hit
    assert ("another user's" in said) is is_hit
    assert is_whole(home)
    assert (shared / "run.json").is_file() is not is_hit or planted == "run.json"
    assert not [name for name in names_in(shared) if name.endswith(".part")]


@needs_root
@pytest.mark.parametrize("kind", ["csv", "prometheus"])
def test_a_planted_pipe_is_no_log(shared: Path, kind: str) -> None:
    os.mkfifo(shared / "log")
    code = f"""
try:
    open_sink("{kind}:{shared}/log").log("title", ())
except NbguardError as error:
    print(error)
"""
    said = run_as(VICTIM, code, imports=f"from nbguard.errors import NbguardError\n{_SINKS}")

    assert "not a regular file" in said


@needs_root
@pytest.mark.parametrize("what", ["link to a file", "link to nothing", "pipe", "file", "folder around"])
def test_a_planted_startup_file_is_left_alone(shared: Path, home: Path, what: str) -> None:
    startup = shared / "profile_default" / "startup"
    if what != "folder around":
        for folder in (startup.parent, startup):
            folder.mkdir()
            folder.chmod(0o777)
    file = startup / "50-nbguard.py"
    if what.startswith("link"):
        link_of(ATTACKER, file, home / ("thesis.txt" if what == "link to a file" else "new.txt"))
    elif what == "pipe":
        os.mkfifo(file)
        file.chmod(0o666)
    elif what == "file":
        file_of(ATTACKER, file, "mine = 1")
    else:
        link_of(ATTACKER, startup.parent, home)
    code = "print(main(['enable']), main(['disable']))"

    imports = "import IPython.paths\nfrom nbguard.frontend.cli import commands, main\nimport nbguard.frontend.notebook.startup"
    said = run_as(VICTIM, code, imports=imports, IPYTHONDIR=str(shared))

    assert said.splitlines()[-1] == ("2 0" if what == "folder around" else "2 2")
    assert [each for each in home.iterdir() if each.is_file() and each.read_text() != THESIS] == []
    assert what == "folder around" or os.path.lexists(file)


@needs_root
def test_a_parked_model_is_not_in_a_file_that_others_can_exchange(shared: Path, torch_process: None) -> None:
    """As the name of the temporary file is another one's by the time that it is mapped."""
    code = f"""
made = tempfile.NamedTemporaryFile
def exchanged(**how):
    file = made(**how)
    os.rename(file.name, file.name + ".moved")
    with open(file.name, "wb") as theirs:
        theirs.truncate(4096)
    return file
tempfile.NamedTemporaryFile = exchanged
storage = _in_a_file(4096)
torch.empty(0, dtype=torch.uint8).set_(storage).fill_(7)
print([path.read_bytes().count(7) for path in sorted(Path({str(shared)!r}).iterdir())])
"""

    said = run_as(
        VICTIM, code, imports="import torch\nfrom nbguard.memory.cleanup.apply.parking import _in_a_file", TMPDIR=str(shared)
    )

    assert said.strip() == "[4096]"
