"""Real IPython kernels for tests: one process that has imported fastai is forked for each, so a kernel starts in a second."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

# Runs in the parent of the kernels: reads a request per line, forks, and becomes an ordinary kernel in the child.
_ZYGOTE = """
import gc, json, os, signal, sys, warnings
warnings.filterwarnings("ignore")
if "--fastai" in sys.argv:
    from fastai.basics import *
    from fastai.callback.all import *
    import pandas, matplotlib.pyplot, matplotlib_inline.backend_inline
import ipykernel.ipkernel, ipykernel.zmqshell, IPython.core.completer, jedi
from ipykernel.kernelapp import IPKernelApp
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.chdir(request["cwd"])
        sys.path.insert(0, request["cwd"])
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0); os.dup2(log, 1); os.dup2(log, 2)
        os.environ.update(request["env"], IPYTHONDIR=request["cwd"])
        try:
            IPKernelApp.launch_instance(["-f", request["connection"], "--HistoryManager.hist_file=:memory:"])
        finally:
            os._exit(0)
    print(pid, flush=True)
"""


class Zygote:
    """A process that forks kernels. With `fastai`, they have it imported already; `env` is the environment of all of them."""

    def __init__(self, *, fastai: bool, env: Mapping[str, str] | None = None) -> None:
        argv = [sys.executable, "-c", _ZYGOTE, *(["--fastai"] if fastai else [])]
        env = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self._ask() == "ready", "the kernels' parent did not start"

    def _ask(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def fork(self, **request: object) -> int:
        """Return the pid of a new kernel process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._ask())

    def stop(self) -> None:
        """End the parent; kernels that run go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


@dataclass
class Cell:
    """What running a cell gave: printed text, displayed bundles, and the error's name and message."""

    stdout: str = ""
    stderr: str = ""
    bundles: list[dict[str, Any]] = field(default_factory=list)
    error: tuple[str, str] | None = None

    @property
    def text(self) -> str:
        """Return the text of all displayed results."""
        return "\n".join(bundle.get("text/plain", "") for bundle in self.bundles)

    def ok(self) -> Cell:
        """Return self, if the cell ran without an error."""
        assert self.error is None, f"{self.error}\n{self.stderr}"
        return self


class Kernel:
    """A real IPython kernel in a process of its own, spoken to over the Jupyter protocol. `env` adds to its environment."""

    def __init__(self, zygote: Zygote, env: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nbguard-kernel-", ignore_cleanup_errors=True)
        self.cwd = Path(self._folder.name)
        # sockets in the folder, not ports: two kernels never ask for the same one
        connection, _ = write_connection_file(str(self.cwd / "connection.json"), transport="ipc", ip=str(self.cwd / "socket"))
        self.pid = zygote.fork(connection=connection, cwd=self._folder.name, log=str(self.cwd / "log"), env=dict(env or {}))
        self.client = BlockingKernelClient(connection_file=connection)
        self.client.load_connection_file()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, *, timeout: float = 90, inputs: Iterable[str] = (), stop_on_error: bool = True) -> Cell:
        """Run a cell to its end and return what it gave; `inputs` answer what it asks (`%debug`)."""
        cell, answers = Cell(), list(inputs)

        def hear(message: dict[str, Any]) -> None:
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                cell.stdout += content["text"]
            elif kind == "stream":
                cell.stderr += content["text"]
            elif kind in ("execute_result", "display_data"):
                cell.bundles.append(content["data"])
            elif kind == "error":
                cell.error = (content["ename"], content["evalue"])

        def answer(message: dict[str, Any]) -> None:
            self.client.input(answers.pop(0) if answers else "q")

        reply = self.client.execute_interactive(
            code, timeout=timeout, output_hook=hear, stdin_hook=answer, allow_stdin=True, stop_on_error=stop_on_error
        )
        if reply["content"]["status"] == "error" and cell.error is None:
            cell.error = (reply["content"]["ename"], reply["content"]["evalue"])
        return cell

    def run_silently(self, code: str) -> None:
        """Run code that leaves no trace in the session: no cell number, no result, no history. It must succeed."""
        reply = self.client.execute_interactive(code, silent=True, store_history=False, output_hook=lambda message: None)
        assert reply["content"]["status"] == "ok", reply["content"]

    def value(self, expression: str) -> Any:
        """Return the value of an expression (plain data), without leaving a trace in Out or in the last result."""
        reply = self.client.execute_interactive(
            "", silent=True, store_history=False, user_expressions={"it": expression}, output_hook=lambda message: None
        )
        found = reply["content"]["user_expressions"]["it"]
        assert found["status"] == "ok", found
        return eval(found["data"]["text/plain"], {})

    def stop(self) -> None:
        """Kill the kernel and what it started."""
        self.client.stop_channels()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._folder.cleanup()
