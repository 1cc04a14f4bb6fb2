"""A real Jupyter server with JupyterLab and Notebook 7, everything of it in a folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.kernels import Zygote, is_gone
from tests.thorough import THOROUGH

ROOT = Path(__file__).resolve().parents[2]
_PROXY = Path(__file__).with_name("forked.py")
_PLUGIN = "nbguard:plugin"
_QUIET = {"fetchNews": "false", "checkForUpdates": False}


class Forks:
    """Starts kernels of a kernelspec by forking a zygote: fastai's import of six seconds is made once for all of them."""

    def __init__(self, zygote: Zygote, folder: Path, env: Mapping[str, str] | None = None) -> None:
        self._zygote = zygote
        self._folder = folder
        # not below pytest's: there a loader's worker binds a socket of 110 letters beside xdist, dies of it, and is waited for
        self._temporary = tempfile.TemporaryDirectory(prefix="nbguard-forks-", ignore_cleanup_errors=True)
        self._env = {"IPYTHONDIR": str(folder / "ipython"), "TMPDIR": self._temporary.name, **(env or {})}
        self._pids: list[int] = []
        address = str(folder / "forks")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(address)
        self._socket.listen()
        self.argv = [sys.executable, "-I", "-S", str(_PROXY), address, "{connection_file}"]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._socket.accept()
                with peer:
                    peer.sendall(str(self._fork(**json.loads(peer.recv(65536)))).encode())

    def _fork(self, connection: str, cwd: str) -> int:
        log = str(self._folder / f"kernel-{len(self._pids)}.log")
        self._pids.append(
            self._zygote.fork(connection=connection, cwd=cwd, outputs=[log, log], env=self._env, frozen=not THOROUGH)
        )
        return self._pids[-1]

    def stop(self) -> None:
        self._socket.close()
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
                is_gone(pid, within=10)
        self._temporary.cleanup()


_OTHERS = ("ipyparallel-labextension",)
"""Extensions of packages that are installed for other tests: a panel and requests of their own are in the way of ours."""


class OtherExtension(NamedTuple):
    """An extension of another package, to be served in place of ours."""

    name: str  # of its labextension
    module: str  # of its server extension
    folder: Path  # into which pip has installed it


class Server:
    """A Jupyter server that runs as long as the tests want it. `url` ends with a slash.

    Args:
        folder: everything of it goes there.
        base_url: the path at which it serves.
        extension: folder of the built extension; None: that of this tree.
        other: the extension that is served in place of it.
    """

    def __init__(
        self, folder: Path, base_url: str = "/", extension: Path | None = None, other: OtherExtension | None = None
    ) -> None:
        self.folder = folder
        self._other = other
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir(parents=True)
        self._share = folder / "share" / "jupyter"
        (self._share / "labextensions").mkdir(parents=True)
        name, built = "nbguard", extension or ROOT / "nbguard" / "labextension"
        if other is not None:
            name, built = other.name, other.folder / "share" / "jupyter" / "labextensions" / other.name
        (self._share / "labextensions" / name).symlink_to(built)
        self._leave_out(_OTHERS)
        self.reset_settings()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}{base_url}"
        self._log = (folder / "server.log").open("w")
        self._process = subprocess.Popen(
            self._command(port, base_url), env=self._environment(), cwd=folder, stdout=self._log, stderr=self._log
        )
        self._wait_until_up()

    def _leave_out(self, extensions: Sequence[str]) -> None:
        """Let no page load these extensions of other packages."""
        config = self.folder / "config" / "labconfig"
        config.mkdir(parents=True)
        (config / "page_config.json").write_text(json.dumps({"disabledExtensions": dict.fromkeys(extensions, True)}))

    def _command(self, port: int, base_url: str) -> list[str]:
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": port,
            "ServerApp.base_url": base_url,
            "ServerApp.root_dir": self.notebooks,
            "ServerApp.open_browser": False,
            "ServerApp.allow_root": True,
            "ServerApp.disable_check_xsrf": True,  # for `ask`; a page sends what it should
            "ServerApp.jpserver_extensions": {"jupyterlab": True, "notebook": True, **self._others_module()},
            "IdentityProvider.token": "",
            "LabApp.expose_app_in_browser": True,
            "LabApp.extension_manager": "readonly",
            "JupyterNotebookApp.expose_app_in_browser": True,
        }
        return [sys.executable, "-m", "jupyter_server", *(f"--{name}={value}" for name, value in options.items())]

    def _others_module(self) -> dict[str, bool]:
        return {} if self._other is None else {self._other.module: True}

    @property
    def processor_time(self) -> float:
        """Return the seconds of processor time that the server has taken, in all of its threads. Linux."""
        return time.clock_gettime((~self._process.pid << 3) | 2)  # clock_getcpuclockid(3)

    def _environment(self) -> dict[str, str]:
        places = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        paths += [] if self._other is None else [str(self._other.folder)]
        return {
            **os.environ,
            **{name: str(self.folder / place) for name, place in places.items()},
            "JUPYTER_PATH": str(self._share),
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
        }

    def _wait_until_up(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            assert self._process.poll() is None, self.log()
            with contextlib.suppress(urllib.error.URLError):
                self.ask("GET", "api/status")
                return
            time.sleep(0.05)
        raise AssertionError(self.log())

    def add_kernelspec(self, name: str, forks: Forks) -> None:
        """Offer kernels that are forked instead of started."""
        self._specify(name, forks.argv, "python")

    def add_program(self, name: str, program: str, language: str = "python") -> None:
        """Offer kernels that a program of Python is, which gets the connection file as its argument."""
        self._specify(name, [sys.executable, "-c", program, "{connection_file}"], language)

    def _specify(self, name: str, argv: list[str], language: str) -> None:
        folder = self._share / "kernels" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": name, "language": language}))

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Return what the server's REST interface answers."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def reset_settings(self) -> None:
        """Make all settings what they are by default, but for news, which would be fetched."""
        shutil.rmtree(self.folder / "settings", ignore_errors=True)
        self._write_settings("@jupyterlab/apputils-extension", "notification", _QUIET)

    def _write_settings(self, package: str, plugin: str, settings: dict[str, object]) -> None:
        folder = self.folder / "settings" / package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{plugin}.jupyterlab-settings").write_text(json.dumps(settings))

    def set_theme(self, theme: str) -> None:
        """Set the theme of pages that are opened from now on."""
        self._write_settings("@jupyterlab/apputils-extension", "themes", {"theme": theme})

    def set_options(self, **options: object) -> None:
        """Set the panel's own settings, for pages that are opened from now on."""
        package, _, plugin = _PLUGIN.partition(":")
        self._write_settings(package, plugin, options)

    def connection_file(self, kernel: str) -> Path:
        return self.folder / "runtime" / f"kernel-{kernel}.json"

    def end_kernels(self) -> None:
        """End every kernel and session, as tests leave them."""
        for kernel in self.ask("GET", "api/kernels"):
            with contextlib.suppress(urllib.error.HTTPError):
                self.ask("DELETE", f"api/kernels/{kernel['id']}")

    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
