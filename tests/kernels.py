"""Real IPython kernels, and programs, for tests: forked from a process that has made the imports, they start at once."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

# Runs in the parent, watched as the tests are (`write_audit.py`): reads a request per line, forks, and becomes an ordinary
# kernel in the child, or runs a program there.
_ZYGOTE = """
import gc, json, os, signal, sys, tempfile, traceback, types, warnings
warnings.filterwarnings("ignore")
exec(compile(open(sys.argv[2]).read(), sys.argv[2], "exec"), audit := {"__file__": sys.argv[2], "__name__": "write_audit"})
audit.pop("install")()
exec(sys.argv[1])
import ipykernel.ipkernel, ipykernel.zmqshell, IPython.core.completer, jedi
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # a line about frozen modules that nobody reads
# what each kernel would import at its start
import ipykernel.debugger, sqlite3, IPython.core.completerlib, IPython.core.oinspect, IPython.extensions.storemagic
import tornado.platform.asyncio, tornado.queues
# what `%load_ext nbguard`, the first report and the first cleanup would import; nothing of it is done yet
import nbguard.api, nbguard.memory.cleanup.apply.apply, nbguard.memory.cleanup.plan.plan_view
import nbguard.memory.cells.name_watch, nbguard.memory.cells.notices, nbguard.memory.cells.repeats
import nbguard.memory.reports.report, nbguard.memory.scan.devices.counters, nbguard.render.html, nbguard.render.text
import nbguard.training.doctor.cuda_start, nbguard.training.ranks.errors
import nbguard.frontend.notebook.predictions, nbguard.frontend.notebook.listeners.cuda_start
import nbguard.frontend.notebook.listeners.oom_card
import nbguard.frontend.notebook.magics.command_line, nbguard.frontend.sidebar.hub.hub
del os.environ["PYDEVD_DISABLE_FILE_VALIDATION"]
from ipykernel.kernelapp import IPKernelApp
# what predictions, diagnoses, profiles and tracebacks would import: for kernels whose looks go over nothing of it
def import_the_rest():
    if "torch" not in sys.modules:
        return
    import pygments.formatters.terminal256, pygments.styles.default, IPython.core.magics.extension, IPython.core.ultratb
    try:
        import stack_data
    except ImportError:  # IPython 7
        pass
    import functorch.compile, networkx, torch._decomp, torch._dynamo.repro.after_dynamo, torch._export.non_strict_utils
    import torch._export.serde.serialize, torch._inductor.codecache, torch.export._trace, torch.fx.experimental.symbolic_shapes
    import nbguard.frontend.notebook.profile, nbguard.training.profiler.render.fit, nbguard.training.prediction.predict
    import nbguard.training.doctor.diagnose, nbguard.training.doctor.launch, nbguard.training.doctor.determinism.trial
    import nbguard.training.doctor.export.trial
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
gc.collect()
print("ready", flush=True)
source, other = sys.stdin, None
while line := source.readline():
    request = json.loads(line)
    if request.get("frozen") and source is sys.stdin:  # another parent has it: the rest is in no look of this one's kernels
        if other is None:
            requests, pids = os.pipe(), os.pipe()
            if os.fork() == 0:
                os.close(requests[1])
                os.dup2(pids[1], 1)
                source = os.fdopen(requests[0])
                import_the_rest()
                gc.collect()
                continue
            other = os.fdopen(requests[1], "w"), os.fdopen(pids[0])
        print(line, end="", file=other[0], flush=True)
        print(other[1].readline(), end="", flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.chdir(request["cwd"])
        sys.path.insert(0, request["cwd"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(request["outputs"], start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.environ.update(request["env"])
        tempfile.tempdir = None  # of TMPDIR, as it is now
        if request.get("frozen"):
            gc.freeze()
            gc.freeze = gc.unfreeze = lambda: None
            gc.get_freeze_count = lambda: 0
        try:
            if "program" in request:
                main = sys.modules["__main__"] = types.ModuleType("__main__")
                exec(request["program"], main.__dict__)
            else:
                IPKernelApp.launch_instance(["-f", request["connection"], "--HistoryManager.hist_file=:memory:"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(); sys.stderr.flush()
            os._exit(0)  # not by way of the interpreter's end, where autograd's threads now and then abort PyTorch 2.13
    print(pid, flush=True)
os._exit(0)  # to take all of it apart would cost a second
"""

TORCH = "import torch, torch._dynamo"  # the first optimizer would import the latter: two seconds
FASTAI = """
from fastai.basics import *
from fastai.callback.all import *
import pandas, matplotlib.pyplot, matplotlib_inline.backend_inline
"""


class Zygote:
    """A process that forks kernels and programs. They have made `imports` already; `env` is the environment of all of them."""

    def __init__(self, imports: str = "", env: Mapping[str, str] | None = None) -> None:
        argv = [sys.executable, "-c", _ZYGOTE, imports, str(Path(__file__).with_name("write_audit.py"))]
        env = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self._ask() == "ready", "the kernels' parent did not start"

    def _ask(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def fork(self, **request: object) -> int:
        """Return the pid of a new process: a kernel for a `connection`, or what runs a `program`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._ask())

    def run(self, program: str, env: Mapping[str, str], timeout: float, *, frozen: bool = False) -> tuple[str, str]:
        """Run a program in a process of its own, here in this folder, and return what it printed to stdout and to stderr.

        `frozen`: as of a kernel.
        """
        with tempfile.TemporaryDirectory(prefix="nbguard-run-") as folder:
            outputs = [Path(folder, name) for name in ("stdout", "stderr")]
            cwd = str(Path.cwd())
            places = {**env, "TMPDIR": folder}  # what it leaves there, killed, goes with the folder
            pid = self.fork(program=program, cwd=cwd, outputs=[str(file) for file in outputs], env=places, frozen=frozen)
            try:
                assert is_gone(pid, timeout), f"still running after {timeout:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            stdout, stderr = (file.read_text() if file.exists() else "" for file in outputs)
            return stdout, stderr

    def stop(self) -> None:
        """End the parent; kernels that run go on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


def is_gone(pid: int, within: float) -> bool:
    """Say whether a process that a zygote has forked is gone, within so many seconds: nobody needs to wait for it."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def wait_until(act: Callable[[], object], what: str, within: float = 20) -> None:
    """Return as soon as `act` says something true; fail after so many seconds."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if act():
            return
        time.sleep(0.03)
    raise AssertionError(f"waited {within:.0f} s for {what}")


@dataclass
class Cell:
    """What running a cell gave: printed text, displayed bundles, and the error's name, message and traceback."""

    stdout: str = ""
    stderr: str = ""
    bundles: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)  # what is displayed, as a saved notebook keeps it
    error: tuple[str, str] | None = None
    traceback: str = ""

    @property
    def text(self) -> str:
        """Return the text of all displayed results."""
        return "\n".join(bundle.get("text/plain", "") for bundle in self.bundles)

    def ok(self) -> Cell:
        """Return self, if the cell ran without an error."""
        assert self.error is None, f"{self.error}\n{self.stderr}"
        return self


class Kernel:
    """A real IPython kernel in a process of its own, spoken to over the Jupyter protocol.

    `env` adds to its environment; `profile` are files of its IPython profile, by name: `ipython_config.py`, `startup/00.py`.
    `frozen`: what the imports have made is in no look, as by `frozen.py`; a cell cannot freeze anything then.
    """

    printed: Callable[[Kernel, Cell], None] | None = None  # is told of each cell that has printed something

    def __init__(
        self,
        zygote: Zygote,
        env: Mapping[str, str] | None = None,
        profile: Mapping[str, str] | None = None,
        *,
        frozen: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="nbguard-kernel-", ignore_cleanup_errors=True)
        self.cwd = Path(self._folder.name)
        for name, text in (profile or {}).items():
            file = self.cwd / "profile_default" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        temporary = self.cwd / "tmp"  # a kernel that is killed leaves there what it would have removed
        temporary.mkdir()
        # sockets in the folder, not ports: two kernels never ask for the same one
        place = str(self.cwd / "socket")
        connection, found = write_connection_file(str(self.cwd / "connection.json"), transport="ipc", ip=place)
        self.pid = zygote.fork(
            connection=connection,
            cwd=self._folder.name,
            outputs=[str(self.cwd / "log")] * 2,
            frozen=frozen,
            env={**(env or {}), "IPYTHONDIR": self._folder.name, "TMPDIR": str(temporary)},
        )
        self.client = BlockingKernelClient(connection_file=connection)
        self.client.load_connection_file()
        sockets = [Path(f"{place}-{number}") for name, number in found.items() if name.endswith("_port")]
        wait_until(lambda: all(map(Path.exists, sockets)), "the kernel's sockets", 60)  # else ZeroMQ tries every 0.1 s
        self.client.start_channels()
        self._wait_until_heard()

    def _wait_until_heard(self) -> None:
        """Return when the kernel answers and what it prints arrives. The client's own `wait_for_ready` takes 0.2 s more."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            self.client.kernel_info(reply=True, timeout=60)
            with contextlib.suppress(queue.Empty):
                self.client.get_iopub_msg(timeout=0.02)
                return
        raise AssertionError("what the kernel prints does not arrive")

    def run(self, code: str, *, timeout: float = 90, inputs: Iterable[str] = (), stop_on_error: bool = True) -> Cell:
        """Run a cell to its end and return what it gave; `inputs` answer what it asks (`%debug`)."""
        cell, answers = Cell(), list(inputs)
        places: defaultdict[str | None, list[int]] = defaultdict(list)

        def hear(message: dict[str, Any]) -> None:
            kind, content = message["header"]["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                cell.stdout += content["text"]
            elif kind == "stream":
                cell.stderr += content["text"]
            elif kind in ("execute_result", "display_data"):
                places[content.get("transient", {}).get("display_id")].append(len(cell.bundles))
                cell.bundles.append(content["data"])
                cell.outputs.append({"output_type": kind, "data": content["data"], "metadata": content["metadata"]})
            elif kind == "update_display_data":
                for n in places[content["transient"]["display_id"]]:
                    cell.bundles[n] = content["data"]
                    cell.outputs[n] |= {"data": content["data"], "metadata": content["metadata"]}
            elif kind == "error":
                cell.error = (content["ename"], content["evalue"])
                cell.traceback = re.sub("\x1b\\[[0-9;]*m", "", "\n".join(content["traceback"]))

        def answer(message: dict[str, Any]) -> None:
            self.client.input(answers.pop(0) if answers else "q")

        reply = self._execute(
            code, timeout=timeout, output_hook=hear, stdin_hook=answer, allow_stdin=True, stop_on_error=stop_on_error
        )
        if reply["content"]["status"] == "error" and cell.error is None:
            cell.error = (reply["content"]["ename"], reply["content"]["evalue"])
        if self.printed is not None and (cell.bundles or cell.stdout):
            self.printed(self, cell)
        return cell

    def run_silently(self, code: str) -> None:
        """Run code that leaves no trace in the session: no cell number, no result, no history. It must succeed."""
        reply = self._execute(code, silent=True, store_history=False, output_hook=lambda message: None)
        assert reply["content"]["status"] == "ok", reply["content"]

    def value(self, expression: str) -> Any:
        """Return the value of an expression (plain data), without leaving a trace in Out or in the last result."""
        reply = self._execute(
            "", silent=True, store_history=False, user_expressions={"it": expression}, output_hook=lambda message: None
        )
        found = reply["content"]["user_expressions"]["it"]
        assert found["status"] == "ok", found
        return eval(found["data"]["text/plain"], {})

    def _execute(self, code: str, **options: Any) -> dict[str, Any]:
        """Have the kernel execute code; return its reply. ipykernel 6.17 refuses what comes in just after an error."""
        while (reply := self.client.execute_interactive(code, **options))["content"]["status"] == "aborted":
            pass
        return reply

    def stop(self) -> None:
        """Kill the kernel and what it started, and see it gone: what it held, on a shared device say, is free then."""
        self.client.stop_channels()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
            is_gone(self.pid, within=10)
        self._folder.cleanup()
