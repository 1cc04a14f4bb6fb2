"""Files, written and read so that other users of the machine can neither destroy anything by it nor stop it.

A file that is written appears under its name as a whole or not at all. It is made beside its target under a name that nobody
can predict, in a folder that is held open meanwhile. Symbolic links are followed where this user, root, or the owner of a
folder that is not open to everybody has made them; one that somebody else can have planted is an error. A file that is read is
a regular one of bounded size, so no pipe keeps the reader waiting and no device fills its memory.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from nbguard.errors import NbguardError
from nbguard.units import format_bytes

_ALWAYS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_AT_ONCE = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
"""Opening a pipe that nobody else has open would wait otherwise."""
_HELD = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | _NO_LINK | _ALWAYS
_HOLDS_FOLDERS = {os.open, os.stat, os.unlink, os.rename} <= os.supports_dir_fd
_CHUNK = 1 << 20
"""Bytes that are read at once."""
_LINKS = 40
"""Symbolic links on the way to one file; the system gives up after as many."""


class Folder:
    """A folder that is held open, so that actions here affect this very folder, whatever its path now means.

    Where the system cannot hold folders (Windows), its path is used each time.

    Raises:
        OSError: there is no such folder, or a symbolic link has its name.
    """

    def __init__(self, path: str | Path, within: int | None = None) -> None:
        self.path: Path = Path(path)
        name = self.path if within is None else self.path.name
        self._handle = os.open(name, _HELD, dir_fd=within) if _HOLDS_FOLDERS else None

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def status(self) -> os.stat_result:
        """Return the status of the folder itself."""
        return self.path.lstat() if self._handle is None else os.fstat(self._handle)

    def status_of(self, name: str) -> os.stat_result | None:
        """Return the status of a file here, of a link itself, or None without one."""
        try:
            return os.stat(self._at(name), dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Return the names of all that is in the folder."""
        if self._handle is None:
            return [each.name for each in self.path.iterdir()]
        readable = os.open(".", os.O_RDONLY | _ALWAYS, dir_fd=self._handle)
        try:
            return [each.name for each in os.scandir(readable)]
        finally:
            os.close(readable)

    def make(self, name: str, mode: int = 0o666) -> BinaryIO:
        """Make a file that was not there before, to be written; `mode` is subject to the umask."""
        return os.fdopen(self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "w+b")

    def open(self, name: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
        """Open a regular file that is no link, and return its descriptor."""
        descriptor = self._open(name, flags | _AT_ONCE, mode)
        return _regular(descriptor, self.path / name)

    def rename(self, old: str, new: str) -> None:
        """Give a file another name; a file that has it goes."""
        os.replace(self._at(old), self._at(new), src_dir_fd=self._handle, dst_dir_fd=self._handle)

    def remove(self, name: str) -> None:
        """Remove the name of a file or a link, if there is one."""
        with suppress(FileNotFoundError):
            os.unlink(self._at(name), dir_fd=self._handle)

    def folder(self, name: str) -> Folder:
        """Return a folder in this one, held open; OSError where the name is a link's."""
        return Folder(self.path / name, self._handle)

    def remove_folder(self, name: str) -> None:
        """Remove a folder in this one; OSError unless it is empty."""
        os.rmdir(self._at(name), dir_fd=self._handle)

    def may_write(self, name: str) -> bool:
        """Say whether the permissions of a file let this user write to it."""
        return os.access(self._at(name), os.W_OK, dir_fd=self._handle)

    def is_private(self) -> bool:
        """Say whether the folder is this user's, and nobody else may look into it."""
        status = self.status()
        return not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & 0o077)

    def _open(self, name: str, flags: int, mode: int) -> int:
        return os.open(self._at(name), flags | _NO_LINK | _ALWAYS, mode, dir_fd=self._handle)

    def _at(self, name: str) -> str:
        """Return the system's identification of a file of this folder: its name where the folder is held."""
        if not name or os.sep in name or name in (".", ".."):
            raise OSError(errno.EINVAL, "this is not the name of a file", name)
        return str(self.path / name) if self._handle is None else name


# --- reading ----------------------------------------------------------------------------------------------------------------


def open_file(path: str | Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: there is none, or it is something else; `strerror` says what.
    """
    place = _expanded(path)
    try:
        kind = place.stat().st_mode  # first: opening a device may set it off
        if not stat.S_ISREG(kind):
            raise _no_regular_file(place, kind)
        return os.fdopen(_regular(os.open(place, os.O_RDONLY | _AT_ONCE | _ALWAYS), place), "rb")
    except ValueError:
        raise OSError(errno.EINVAL, "this is not the name of a file", str(path)) from None


def unreadable(path: str | Path, error: OSError) -> str:
    """Return the sentence, without a full stop, that all commands say of a file that cannot be read.

    Args:
        path: the file as the user named it.
        error: the reason.
    """
    missing = error.strerror == os.strerror(errno.ENOENT)
    return f"{path} cannot be read: {'there is no such file' if missing else error.strerror or type(error).__name__}"


def read_file(path: str | Path, limit: int) -> bytes:
    """Return the content of a regular file that has at most `limit` bytes.

    Raises:
        OSError: there is none, it is something else, or it is larger (`errno.EFBIG`); `strerror` says what.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size <= limit:
            parts, room = [], limit + 1  # it may grow meanwhile, and some of the system's files say that they are empty
            while room and (part := file.read(min(room, _CHUNK))):
                parts.append(part)
                room -= len(part)
            if room:
                return b"".join(parts)
    raise OSError(errno.EFBIG, f"it is larger than {format_bytes(limit)}", str(path))


def _regular(descriptor: int, place: Path) -> int:
    """Return the descriptor of a regular file; close any other, and say that it is none."""
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise _no_regular_file(place, kind)
    return descriptor


def _no_regular_file(place: Path, kind: int) -> OSError:
    if stat.S_ISDIR(kind):
        return IsADirectoryError(errno.EISDIR, "it is a folder", str(place))
    return OSError(errno.EINVAL, "it is not a regular file", str(place))


# --- writing ----------------------------------------------------------------------------------------------------------------


def write_file(path: str | Path, data: bytes | str) -> Path:
    """Write a file as a whole, in UTF-8 if it is text, and return its path without `~`; an older one stays until then.

    A new file has the permissions that the umask leaves, and one that replaces a file of this user's has that one's.

    Raises:
        OSError: it cannot be written, and nothing has been; `strerror` says why.
    """
    write_files({path: data})
    return _expanded(path)


def write_files(contents: Mapping[str | Path, bytes | str]) -> None:
    """Write several files as `write_file` does: none gets its name before all are written. Names are given in this order.

    Raises:
        OSError: one cannot be written; `strerror` says why.
    """
    with ExitStack() as stack:
        made = []
        for path, data in contents.items():
            folder, name = target_of(path)
            stack.enter_context(folder)
            content = data.encode("utf-8", "replace") if isinstance(data, str) else data
            made.append((folder, _beside(folder, name, content, stack), name))
        for folder, temporary, name in made:
            folder.rename(temporary, name)


def append_to_file(path: str | Path, data: bytes) -> None:
    """Add to the end of a file, in one go; a file that is not there is made.

    Raises:
        OSError: it cannot be written; `strerror` says why.
    """
    folder, name = target_of(path)
    with folder:
        descriptor = folder.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with os.fdopen(descriptor, "ab") as file:
            status = os.fstat(descriptor)
            if status.st_nlink > 1 and folder.status().st_mode & 0o022:  # another user can have linked a file of this one's
                raise OSError(errno.EPERM, "it has several names, in a folder that others can write to", str(path))
            file.write(data)


def target_of(path: str | Path) -> tuple[Folder, str]:
    """Return the folder and the name behind a path that is to be written to, every link on the way looked at.

    Raises:
        OSError: there is no such folder, there is something else than a regular file, or a link is another user's.
    """
    place = _expanded(path)
    try:
        place = _followed(Path.cwd() / place)
        folder = Folder(place.parent)
    except ValueError:
        raise OSError(errno.EINVAL, "this is not the name of a file", str(path)) from None
    with ExitStack() as stack:
        stack.enter_context(folder)
        there = folder.status_of(place.name)
        if there is not None and not stat.S_ISREG(there.st_mode):
            raise _no_regular_file(place, there.st_mode)
        if there is not None and not folder.may_write(place.name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        stack.pop_all()
    return folder, place.name


def check_path(path: str | Path) -> Path:
    """Return the path in full; NbguardError unless a file can be written there. Asked before a fit, which may take hours."""
    target = Path.cwd() / path
    try:
        target = Path.cwd() / Path(path).expanduser()
        folder, _ = target_of(target)
    except FileNotFoundError:
        raise NbguardError(
            f"cannot write {target}: there is no folder {target.parent}; make it, or name another file"
        ) from None
    except RuntimeError:
        raise NbguardError(f"cannot write {path}: there is no such home folder; name another file") from None
    except OSError as error:
        raise NbguardError(f"cannot write {target}: {error.strerror}; name another file") from None
    with folder:
        if not os.access(folder.path, os.W_OK):
            raise NbguardError(f"cannot write {target}: no permission; name another file")
    return target


def _beside(folder: Folder, name: str, data: bytes, stack: ExitStack) -> str:
    """Write data to a new file of a folder, which goes with the stack unless it gets another name, and return its name."""
    temporary = f".nbguard-{secrets.token_hex(8)}.part"
    stack.callback(_remove, folder, temporary)
    older = folder.status_of(name)
    with folder.make(temporary, 0o666 if older is None else older.st_mode & 0o666 | 0o200) as file:
        if older is not None and hasattr(os, "getuid") and older.st_uid == os.getuid():
            os.fchmod(file.fileno(), stat.S_IMODE(older.st_mode) & 0o777)
        file.write(data)
    return temporary


def _remove(folder: Folder, name: str) -> None:
    with suppress(OSError):
        folder.remove(name)


def _followed(place: Path) -> Path:
    """Return an absolute path without links.

    Raises:
        OSError: another user can have planted one of them.
    """
    done, ahead, links = Path(place.anchor), list(reversed(place.parts[1:])), 0
    while ahead:
        part = ahead.pop()
        if part == "..":
            done = done.parent
            continue
        here = done / part
        try:
            status = here.lstat()
        except FileNotFoundError:
            return here.joinpath(*reversed(ahead))
        if not stat.S_ISLNK(status.st_mode):
            done = here
            continue
        links += 1
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(place))
        if hasattr(os, "getuid") and not _is_trusted(status, done.stat(), is_last=not ahead):
            raise PermissionError(errno.EPERM, "it leads through a symbolic link of another user's", str(here))
        target = here.readlink()
        if target.is_absolute():
            done = Path(target.anchor)
        ahead += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return done


def _is_trusted(link: os.stat_result, folder: os.stat_result, is_last: bool) -> bool:
    """Say whether a link is followed: this user's, root's, or on the way the folder owner's where not everybody can write."""
    if link.st_uid in (os.getuid(), 0):
        return True
    return not is_last and link.st_uid == folder.st_uid and not folder.st_mode & stat.S_IWOTH


def _expanded(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise OSError(errno.ENOENT, "there is no such home folder", str(path)) from None
