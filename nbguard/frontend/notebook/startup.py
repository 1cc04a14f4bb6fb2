"""Loading nbguard in every notebook by one file in the startup folder of an IPython profile."""

from __future__ import annotations

import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbguard.errors import NbguardError
from nbguard.files import read_file, write_file

FILE = "50-nbguard.py"
_MARK = "# Written by `nbguard enable`; `nbguard disable` removes it."
_LARGEST = 1 << 16
"""Bytes of a file that nbguard can have written; a larger one is somebody else's."""
_SOURCE = f'''{_MARK}
def _load_nbguard():
    """Load nbguard into this kernel, where its environment has it."""
    from importlib.util import find_spec

    shell = get_ipython()
    if shell is not None and find_spec("nbguard") is not None:
        try:
            shell.extension_manager.load_extension("nbguard")
        except Exception as error:
            print(f"nbguard could not be loaded ({{type(error).__name__}}): `nbguard disable` ends the attempt")


_load_nbguard()
del _load_nbguard
'''


@dataclass(frozen=True, slots=True)
class Startup:
    """The file that loads nbguard with each session of a profile."""

    profile: str  # name of the IPython profile
    path: Path  # of the file, whether it is there or not
    state: str  # `on`, `off`, or `other`: there is a file of that name that nbguard has not written
    before: str = ""  # the state that a change ended; empty if nothing was changed

    @property
    def sentence(self) -> str:
        """Return the change or the state in words."""
        match self.before, self.state:
            case "off", "on":
                return f"wrote {self.path}: new kernels load nbguard; in those that run now, run %load_ext nbguard"
            case "on", "off":
                return f"removed {self.path}: new kernels do not load nbguard; those that run now keep it"
        if self.state == "on":
            return f"nbguard is loaded in every notebook of the profile {self.profile}: {self.path}"
        if self.state == "other":
            return f"nbguard did not write {self.path}, so it stays"
        return f"nbguard is not loaded automatically in the profile {self.profile}: {FILE} is not in {self.path.parent}"


def load(shell: Any, everywhere: bool) -> None:
    """Load nbguard into a session as `%load_ext` does, and serve panels where it is loaded and does not (`%nbguard off`).

    `everywhere`: with each session of the shell's profile from now on, too. Raises NbguardError as `enable` does.
    """
    from nbguard.frontend.notebook.magics import load as load_magics  # here: `nbguard enable` in a terminal needs no IPython

    shell.extension_manager.load_extension("nbguard")
    load_magics(shell)
    if everywhere:
        enable(shell.profile)


def startup(profile: str = "default") -> Startup:
    """Return whether nbguard is loaded with each session of a profile."""
    path = _folder(profile) / FILE
    if not path.exists() and not path.is_symlink():
        return Startup(profile, path, "off")
    return Startup(profile, path, "on" if _is_ours(path) else "other")


def enable(profile: str = "default") -> Startup:
    """Load nbguard with each session of a profile from now on, in all environments that have nbguard.

    Raises:
        NbguardError: there is no such profile, or a file of that name that nbguard has not written, or none can be written.
    """
    now = startup(profile)
    if now.state == "other":
        raise NbguardError(f"{now.sentence}; move it away first")
    if profile != "default" and not now.path.parents[1].is_dir():
        raise NbguardError(f"there is no IPython profile {profile}:  ipython profile create {profile}  makes one")
    try:
        now.path.parent.mkdir(parents=True, exist_ok=True)
        write_file(now.path, _SOURCE)
    except OSError as error:
        raise NbguardError(f"{now.path} cannot be written: {error.strerror}") from None
    return replace(startup(profile), before=now.state if now.state == "off" else "")


def disable(profile: str = "default") -> Startup:
    """Remove the file that `enable` wrote, and nothing else.

    Raises:
        NbguardError: the file cannot be removed, or nbguard has not written it.
    """
    now = startup(profile)
    if now.state == "other":
        raise NbguardError(now.sentence)
    try:
        now.path.unlink(missing_ok=True)
    except OSError as error:
        raise NbguardError(f"{now.path} cannot be removed: {error.strerror}") from None
    return replace(startup(profile), before=now.state if now.state == "on" else "")


def _folder(profile: str) -> Path:
    """Return the startup folder of a profile, in the folder that IPython itself uses (`IPYTHONDIR`, or in the home folder)."""
    if not profile.replace("-", "").replace("_", "").isalnum():
        raise NbguardError(f"{profile!r} is not the name of an IPython profile")
    return _ipython_folder() / f"profile_{profile}" / "startup"


def _ipython_folder() -> Path:
    """Return IPython's folder. Where that cannot be written to, IPython makes a temporary one at each start, which is none.

    Raises:
        NbguardError: IPython's folder cannot be written to.
    """
    from IPython.paths import get_ipython_dir

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        folder = Path(get_ipython_dir())
    why = next((str(each.message) for each in said if "using a temp directory" in str(each.message)), "")
    if why:
        with suppress(OSError):
            folder.rmdir()
        raise NbguardError(f"IPython cannot keep files, so nothing loads nbguard: {why.partition(',')[0]}")
    return folder


def _is_ours(path: Path) -> bool:
    try:
        return read_file(path, _LARGEST).startswith(_MARK.encode())
    except OSError:
        return False
