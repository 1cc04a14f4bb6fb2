"""Files are written whole, in the place that was named and in no other, and read only where reading comes to an end."""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from pathlib import Path

import pytest

from nbguard.files import Folder, append_to_file, open_file, read_file, write_file, write_files
from tests.other_users import ARE_REAL, ATTACKER, VICTIM, file_of, folder_of, link_of, needs_root, run_as

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="permissions and links of POSIX")

THESIS = "ten years of work"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def _append(path: Path | str) -> None:
    append_to_file(path, b"x")


def _write(path: Path | str) -> None:
    write_file(path, "x")


def _read(path: Path | str) -> None:
    read_file(path, 9)


# --- what is written --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["", "µ\n", b"\x00\xff", "x" * 3_000_000, "\ud800"])
def test_a_file_is_written_and_nothing_else(tmp_path: Path, data: bytes | str) -> None:
    (tmp_path / "by Python").touch()

    path = write_file(tmp_path / "a", data)

    assert path.read_bytes() == (data if isinstance(data, bytes) else data.encode("utf-8", "replace"))
    assert mode_of(path) == mode_of(tmp_path / "by Python")
    assert names_in(tmp_path) == ["a", "by Python"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_an_older_file_hands_on_its_permissions(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(mode)

    write_file(path, "new")

    assert (path.read_text(), mode_of(path)) == ("new", mode)


def test_nobody_can_look_into_a_private_file_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o600)
    monkeypatch.setattr(os, "fchmod", lambda *_: None)  # what it is made with is what it has before

    write_file(path, "new")

    assert mode_of(path) == 0o600


def test_several_files_are_written_or_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    with pytest.raises(OSError, match="folder"):
        write_files({tmp_path / "a": "new", tmp_path: "new"})

    assert (tmp_path / "a").read_text() == "old"
    assert names_in(tmp_path) == ["a"]


def test_an_interrupt_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(os, "replace", interrupted)

    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "a", "new")

    assert (tmp_path / "a").read_text() == "old"
    assert names_in(tmp_path) == ["a"]


def test_a_file_that_its_owner_protects_stays(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o444)
    if os.access(path, os.W_OK):
        pytest.skip("root may write to every file")

    for act in (_write, _append):
        with pytest.raises(PermissionError):
            act(path)

    assert path.read_text() == "old"


def test_handles_do_not_pile_up(tmp_path: Path) -> None:
    def act() -> int:
        for path in (tmp_path, tmp_path / "no" / "a"):
            with pytest.raises(OSError, match=r"folder|No such"):
                _write(path)
        _write(tmp_path / "a")
        _append(tmp_path / "a")
        _read(tmp_path / "a")
        return len(list(Path("/dev/fd").iterdir()))

    before = act()

    assert [act() for _ in range(20)] == [before] * 20


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/a", "No such file"),
        ("", "it is a folder"),
        ("a\0b", "not the name of a file"),
        ("x" * 300, "too long"),
        ("pipe", "not a regular file"),
        ("to a pipe", "not a regular file"),
        ("socket", "not a regular file"),
        ("round", "symbolic links"),
        ("file/a", "Not a directory"),
    ],
)
def test_what_is_no_place_for_a_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("to a pipe").symlink_to("pipe")
    Path("file").touch()
    Path("round").symlink_to("around")
    Path("around").symlink_to("round")
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind("socket")
        before = names_in(tmp_path)

        for act in (_write, _append, _read):
            with pytest.raises(OSError, match=words):
                act(tmp_path / name)

    assert names_in(tmp_path) == before


def test_devices_are_no_files() -> None:
    for act, name in ((_write, "/dev/null"), (_append, "/dev/null"), (_read, "/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            act(name)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("act", [_write, _append, _read])
def test_no_such_home_folder_is_an_error_of_the_file(act: object) -> None:
    with pytest.raises(FileNotFoundError, match="home folder"):
        act("~nobody-of-that-name/a")  # type: ignore[operator]


# --- what is read -----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)

    assert len(read_file(tmp_path / "a", 3_000_000)) == 3_000_000
    with pytest.raises(OSError, match=r"larger than 2\.86 MiB") as refused:
        read_file(tmp_path / "a", 2_999_999)
    assert refused.value.errno == errno.EFBIG


def test_a_file_that_says_it_is_empty_is_read_up_to_its_bound() -> None:
    grows = Path("/proc/self/maps")
    if not grows.exists():
        pytest.skip("no /proc here")
    assert grows.stat().st_size == 0
    assert read_file(grows, 1 << 24)
    with pytest.raises(OSError, match="larger than"):
        read_file(grows, 100)


def test_a_link_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "link").symlink_to("a")

    with open_file(tmp_path / "link") as file:
        assert file.read() == read_file(tmp_path / "link", 1) == b"x"


# --- what others plant ------------------------------------------------------------------------------------------------------


def test_this_users_links_lead_on(tmp_path: Path) -> None:
    for name in ("real", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "folder").symlink_to("real")
    (tmp_path / "real" / "link").symlink_to("../other/../b")

    write_file(tmp_path / "folder" / "link", "new")
    append_to_file(tmp_path / "folder" / "link", b"er")

    assert (tmp_path / "b").read_text() == "newer"
    assert (tmp_path / "real" / "link").is_symlink()


@needs_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
@pytest.mark.parametrize("owner", [0, ATTACKER])
def test_a_planted_link_leads_nowhere(open_tmp_path: Path, mode: int, owner: int) -> None:
    shared, home = folder_of(owner, open_tmp_path / "shared", mode), folder_of(VICTIM, open_tmp_path / "home", 0o700)
    thesis = file_of(VICTIM, home / "thesis.txt", THESIS)
    link_of(ATTACKER, shared / "run.json", thesis)
    link_of(ATTACKER, shared / "new.json", home / "new.txt")
    code = f"""
for name in ("run.json", "new.json"):
    for act in (write_file, append_to_file):
        try:
            act(Path({str(shared)!r}) / name, b"x")
        except OSError as error:
            print(error.strerror)
"""

    said = run_as(VICTIM, code, imports="from nbguard.files import append_to_file, write_file")

    assert said.splitlines() == ["it leads through a symbolic link of another user's"] * 4
    assert thesis.read_text() == THESIS
    assert names_in(home) == ["thesis.txt"]
    assert names_in(shared) == ["new.json", "run.json"]


@needs_root
def test_a_planted_link_to_a_folder_leads_nowhere(tmp_path: Path) -> None:
    shared, home = folder_of(0, tmp_path / "shared", 0o1777), folder_of(VICTIM, tmp_path / "home", 0o700)
    thesis = file_of(VICTIM, home / "thesis.txt", THESIS)
    link_of(ATTACKER, shared / "runs", home)

    for act in (_write, _append):
        with pytest.raises(PermissionError, match="another user's"):
            act(shared / "runs" / "thesis.txt")  # as root, whom nothing else would stop

    assert thesis.read_text() == THESIS


@needs_root
def test_a_link_of_the_folders_owner_on_the_way_is_followed(tmp_path: Path) -> None:
    data = folder_of(VICTIM, tmp_path / "data")
    (tmp_path / "real").mkdir()
    link_of(VICTIM, data / "runs", tmp_path / "real")

    write_file(data / "runs" / "a", "x")  # root in a container, in a folder of its user's

    assert (tmp_path / "real" / "a").read_text() == "x"


@needs_root
def test_what_root_writes_over_anothers_private_file_stays_private(tmp_path: Path) -> None:
    file_of(VICTIM, tmp_path / "a", "old").chmod(0o600)

    _write(tmp_path / "a")

    assert mode_of(tmp_path / "a") == 0o600


@pytest.mark.skipif(ARE_REAL, reason="root's links lead everywhere: the tests with two users say it all")
def test_another_users_links_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thesis.txt").write_text(THESIS)
    (tmp_path / "link").symlink_to("thesis.txt")
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)

    for act in (_write, _append):
        with pytest.raises(PermissionError, match="another user's"):
            act(tmp_path / "link")

    assert (tmp_path / "thesis.txt").read_text() == THESIS


def test_names_that_could_be_foreseen_are_not_used(tmp_path: Path) -> None:
    thesis, folder, pid = tmp_path / "thesis.txt", tmp_path / "shared", os.getpid()
    thesis.write_text(THESIS)
    folder.mkdir()
    for name in ("a.tmp", f"a.{pid}.tmp", f".a.{pid}.part", f"a.{pid}", ".a.tmp", ".a.part", f".a.{pid}.tmp", "a~"):
        (folder / name).symlink_to(thesis)
    before = names_in(folder)

    _write(folder / "a")

    assert thesis.read_text() == THESIS
    assert names_in(folder) == sorted([*before, "a"])


def test_a_name_that_is_there_already_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text(THESIS)
    (tmp_path / "link").symlink_to("thesis.txt")
    os.mkfifo(tmp_path / "pipe")

    with Folder(tmp_path) as folder:
        for name in ("link", "thesis.txt", "pipe"):
            with pytest.raises(FileExistsError):
                folder.make(name)
        with pytest.raises(OSError, match="symbolic link"):
            folder.open("link")
        with pytest.raises(OSError, match="regular"):
            folder.open("pipe")
        for name in ("../thesis.txt", "..", ".", ""):
            with pytest.raises(OSError, match="not the name of a file"):
                folder.open(name)


def test_a_folder_that_is_held_is_another_ones_by_name_only(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    (theirs / "a").write_text(THESIS)
    with Folder(mine) as folder:
        folder.make("a").close()
        mine.rename(tmp_path / "moved")
        mine.symlink_to(theirs)

        folder.remove("a")

        assert (theirs / "a").read_text() == THESIS
        assert folder.names() == []
    with pytest.raises(OSError, match=r"directory|symbolic"):
        Folder(mine)


def test_nothing_is_added_to_what_others_can_have_linked(tmp_path: Path) -> None:
    thesis, shared = tmp_path / "thesis.txt", tmp_path / "shared"
    thesis.write_text(THESIS)
    shared.mkdir(mode=0o700)
    (shared / "log.csv").hardlink_to(thesis)

    append_to_file(shared / "log.csv", b"")
    shared.chmod(0o777)
    with pytest.raises(OSError, match="several names"):
        _append(shared / "log.csv")
    _write(shared / "log.csv")

    assert thesis.read_text() == THESIS
