"""`nbguard.run_record`: the parts of a run, collected before it begins."""

from __future__ import annotations

import difflib
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from nbguard.files import read_file
from nbguard.memory.core.processes import session_name
from nbguard.memory.scan.devices.host import dotted, library_versions, usable_cores
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.memory.scan.scan import Notebook
from nbguard.plain_data import read_json
from nbguard.training.runs.analysis.cell_seeds import cells_behind
from nbguard.training.runs.analysis.record import TOPICS, RunCell, RunRecord
from nbguard.training.runs.analysis.source import HIDDEN, RECORDED_VARIABLES, clean_source, is_secret_name, without_secrets
from nbguard.training.runs.collector import FactCollector
from nbguard.training.runs.data import collect_data
from nbguard.training.runs.fingerprint import bytes_hash
from nbguard.training.runs.settings import (
    Ingredients,
    collect_generators,
    collect_learner,
    collect_loaders,
    collect_model,
    collect_optimizer,
    collect_seeds,
    ingredients_of,
)
from nbguard.units import format_bytes

# --- The state of the working tree, asked of git in a few bounded questions that change nothing, not even its index.


_PATIENCE = 2.0
"""Seconds for each question. A tree so large that it takes longer is not waited for."""

_MOST = 20_000
"""Characters of the changes."""

_FILES_NAMED = 20
_LARGEST = 200_000
"""Bytes of a file whose changes are on record."""

_CHANGED = ("diff", "--no-ext-diff", "--no-textconv", "--no-renames", "--name-only", "-z", "HEAD", "--", ":(top,glob)**/*.py")
_SAFE = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks")


def collect_git(facts: FactCollector, folder: Path, *, has_code: bool = True) -> str:
    """Collect commit, branch and the names of changed files; return the changes of Python files since the commit.

    Secrets are taken out of both versions of a file before they are compared: a hunk does not tell where a string begins.
    With `has_code` False no code is read.
    """
    try:
        return _collect(facts, folder, has_code=has_code)
    except FileNotFoundError:
        facts.miss("git", "commit", "git is not installed, or the folder of the process is gone")
    except subprocess.TimeoutExpired:
        facts.miss("git", "commit", f"git took longer than {_PATIENCE:.0f} s")
    return ""


def _collect(facts: FactCollector, folder: Path, *, has_code: bool) -> str:
    top = _ask(folder, "rev-parse", "--show-toplevel")
    if top is None:
        facts.miss("git", "commit", f"{folder.name or folder} is in no git repository")
        return ""
    commit = _ask(folder, "rev-parse", "HEAD")
    if commit is None:
        facts.miss("git", "commit", "the repository has no commit yet")
        return ""
    facts.add("git", "commit", commit.strip())
    facts.add("git", "branch", (_ask(folder, "rev-parse", "--abbrev-ref", "HEAD") or "?").strip())
    if remote := (_ask(folder, "config", "--get", "remote.origin.url") or "").strip():
        facts.add("git", "repository", remote)
    status = (_ask(folder, "status", "--porcelain", "--untracked-files=normal") or "").splitlines()
    changed = sorted(line[3:] for line in status if not line.startswith("??"))
    facts.add("git", "dirty", bool(changed))
    facts.add("git", "untracked", sum(line.startswith("??") for line in status))
    if changed:
        facts.add("git", "changed", ", ".join(changed))
    return _changes(folder, Path(top.strip())) if has_code and changed else ""


def _changes(folder: Path, top: Path) -> str:
    """Return how the Python files that git tracks differ from the commit, as a unified diff; time and length are bounded."""
    deadline = time.monotonic() + _PATIENCE
    names = [name for name in (_ask(folder, *_CHANGED) or "").split("\0") if name]
    parts = []
    for name in names[:_FILES_NAMED]:
        if time.monotonic() > deadline:
            break
        before = _ask(folder, "cat-file", "blob", f"HEAD:{name}") or ""
        after = _text(top / name)
        if len(before) <= _LARGEST and after is not None:
            lines = (clean_source(before).splitlines(), clean_source(after).splitlines())
            parts.append("\n".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}", lineterm="")))
    diff = "\n".join(part for part in parts if part)
    left = len(names) - len(parts)
    more = f"\n… and {left} files more" if left else ""
    return f"{diff}{more}" if len(diff) <= _MOST else f"{diff[:_MOST]}\n… {len(diff) - _MOST:,} characters more{more}"


def _text(path: Path) -> str | None:
    """Return a file's text, empty if it is gone; None where it is no file of its own or too large."""
    try:
        return None if path.is_symlink() else read_file(path, _LARGEST).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError:
        return None


def _ask(folder: Path, *question: str) -> str | None:
    """Return git's answer, or None where it refuses."""
    command = ["git", *_SAFE, *question]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    asked = subprocess.run(  # noqa: S603 - git itself, without a shell
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, check=False
    )
    return asked.stdout.decode("utf-8", "replace") if asked.returncode == 0 else None


_CELL = 10_000
"""Characters of a cell's source on record."""
_CELLS = 200
_NOTEBOOK = 20 * 1024**2
"""Most bytes of a notebook's file that is read, to say which cells were edited since they ran."""
_SOURCE = 20 * 1024**2
"""Most bytes of a module's file that is read."""
_FILES = 200
_NAMES = 5


def notebook_path(namespace: dict[str, Any]) -> Path | None:
    """Return the notebook that this kernel runs, where its server or VS Code tells; None otherwise."""
    for told in (session_name(os.environ), namespace.get("__vsc_ipynb_file__")):
        if type(told) is str and told.endswith(".ipynb"):
            return Path(told)
    return None


def names_of(notebook: Notebook, *objects: Any) -> list[str]:
    """Return the names of the user's for these very objects."""
    ids = {id(each) for each in objects if each is not None}
    own = list(notebook.namespace.items())
    return [name for name, value in own if type(name) is str and not name.startswith("_") and id(value) in ids][:_NAMES]


def collect_cells(
    facts: FactCollector, notebook: Notebook, names: Sequence[str], path: Path | None, *, is_fit: bool
) -> tuple[RunCell, ...]:
    """Return the cells that the names come from, as they ran; each says whether the saved notebook has it otherwise now."""
    cells = notebook.inputs
    if not cells:
        facts.miss("code", "cells", "without IPython the cells that ran are not known")
        return ()
    roles = cells_behind(cells, names, len(cells) - 1, is_fit=is_fit)
    saved = _saved_sources(facts, path)
    typed = _typed(notebook.shell, cells)
    made = []
    for number, role in list(roles.items())[-_CELLS:]:
        source = typed[number]
        edited = "" if saved is None else "no" if source.strip() in saved else "yes"
        made.append(RunCell(number=number, source=clean_source(source[:_CELL]), role=role, edited=edited))
    return tuple(made)


def _typed(shell: Any, cells: Sequence[str]) -> Sequence[str]:
    """Return the cells as the user typed them; with magics as Python where IPython does not tell."""
    raw = getattr(getattr(shell, "history_manager", None), "input_hist_raw", None)
    return raw if type(raw) is list and len(raw) == len(cells) else cells


def _saved_sources(facts: FactCollector, path: Path | None) -> frozenset[str] | None:
    """Return the sources of the cells in the notebook's file; None, with the reason on record, where they are not known."""
    if path is None:
        facts.miss("code", "edited since", "this notebook's name is not known")
        return None
    try:
        cells = read_json(read_file(path, _NOTEBOOK))["cells"]
        return frozenset(_joined(cell.get("source", "")).strip() for cell in cells if cell.get("cell_type") == "code")
    except OSError as error:
        facts.miss("code", "edited since", f"the saved notebook cannot be read ({error.strerror})")
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        facts.miss("code", "edited since", f"the saved notebook cannot be read ({type(error).__name__})")
        return None


def _joined(source: Any) -> str:
    return "".join(source) if type(source) is list else str(source)


def collect_modules(facts: FactCollector, folder: Path) -> None:
    """Collect a hash of the source of each imported module that lies below the folder of the run: the user's own."""
    roots = tuple(f"{path}{os.sep}" for path in (folder.absolute(), folder.resolve()))
    own = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__dict__", {}).get("__file__") if type(module) is type(sys) else None
        if type(path) is str and path.endswith(".py") and _is_own(path, roots):
            own.append((name, Path(path)))
    for name, source in sorted(own)[:_FILES]:
        try:
            facts.add("code", f"module {name}", bytes_hash(read_file(source, _SOURCE)))
        except OSError:
            facts.miss("code", f"module {name}", "its file can no longer be read")


def _is_own(path: str, roots: tuple[str, ...]) -> bool:
    return path.startswith(roots) and "site-packages" not in path and f"{os.sep}nbguard{os.sep}" not in path


# --- The versions, hardware, variables and switches around a run, read without importing or initialising anything.


def collect_versions(facts: FactCollector) -> None:
    """Collect Python, the distributions that are imported, and the libraries that torch was built with."""
    facts.add("versions", "python", platform.python_version())
    for name, version in imported_distributions():
        facts.add("versions", name, version)
    torch: Any = sys.modules.get("torch")
    if torch is None:
        facts.miss("versions", "torch", "PyTorch is not imported")
        return
    build = library_versions(torch)
    named = {"CUDA": build.cuda, "ROCm": build.hip, "cuDNN": dotted(build.cudnn_loaded), "NCCL": dotted(build.nccl)}
    for name, version in named.items():
        if version:
            facts.add("versions", name, version)


def imported_distributions() -> list[tuple[str, str]]:
    """Return (distribution, version) of all whose modules are imported here, by name."""
    tops = {name.partition(".")[0] for name in list(sys.modules)} - set(sys.stdlib_module_names) - {"__main__", "__mp_main__"}
    return sorted({known for top in tops if (known := _distribution(top)) is not None}, key=lambda each: each[0].lower())


@cache
def _distribution(top: str) -> tuple[str, str] | None:
    """Return the distribution that a top-level module came with; None for one that came with none."""
    try:
        return top.replace("_", "-") if "_" in top else top, metadata.version(top)
    except (metadata.PackageNotFoundError, ValueError):
        return _owners().get(top)


@cache
def _owners() -> dict[str, tuple[str, str]]:
    """Return the distribution of each top-level name that an installed file begins with: a tenth of a second, once."""
    owners: dict[str, tuple[str, str]] = {}
    for each in metadata.distributions():
        for line in (each.read_text("RECORD") or "").splitlines():
            top = line.partition("/")[0]
            if "/" in line and top not in owners and not top.endswith((".dist-info", ".data")) and top not in ("..", "bin"):
                owners[top] = each.metadata["Name"], each.version
    return owners


def collect_hardware(facts: FactCollector) -> None:
    """Collect the processor, the memory and the GPUs as the driver names them."""
    facts.add("hardware", "processor", _processor() or platform.machine())
    facts.add("hardware", "cores", usable_cores())
    facts.attempt("hardware", "memory", lambda: facts.add("hardware", "memory", format_bytes(_memory())))
    with NvmlReader() as reader:
        driver = reader.driver()
        if driver is None:
            facts.miss("hardware", "GPUs", (reader.reason or "the driver does not answer").partition(":")[0])
            return
    version, cuda, gpus = driver
    facts.add("versions", "driver", f"{version}, CUDA up to {cuda[0]}.{cuda[1]}")
    facts.add("hardware", "GPUs", "; ".join(f"{name}, capability {major}.{minor}" for name, (major, minor) in gpus) or "none")


def _processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of the processor, whose instructions decide how sums are rounded."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def collect_variables(facts: FactCollector, variables: Mapping[str, str] = os.environ) -> None:
    """Collect the variables of the environment that computing libraries read, and no other."""
    for name, value in sorted(variables.items()):
        if name.startswith(RECORDED_VARIABLES):
            facts.add("variables", name, HIDDEN if is_secret_name(name) else without_secrets(value, keeps_hashes=False))


def collect_switches(facts: FactCollector) -> None:
    """Collect the switches of torch that decide how numbers are computed."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        facts.miss("precision", "switches", "PyTorch is not imported")
        return
    for name, read in _switches(torch):
        try:
            facts.add("precision", name, read())
        except (AttributeError, RuntimeError):
            facts.miss("precision", name, "this version of PyTorch does not tell")


def _switches(torch: Any) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each switch with its reader; none initialises a device."""
    modes = {0: "off", 1: "warn only", 2: "on"}
    yield "deterministic mode", lambda: modes[torch.get_deterministic_debug_mode()]
    yield "cudnn.benchmark", lambda: bool(torch._C._get_cudnn_benchmark())
    yield "cudnn.deterministic", lambda: bool(torch._C._get_cudnn_deterministic())
    yield "float32 matmul", lambda: torch.get_float32_matmul_precision()
    yield "threads", lambda: torch.get_num_threads()
    yield "default dtype", lambda: str(torch.get_default_dtype())
    yield "autocast", lambda: bool(torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled())


def collect_place(facts: FactCollector, notebook: Path | None) -> None:
    """Collect where the run took place."""
    facts.add("place", "system", f"{platform.system()} {platform.release()}")
    facts.add("place", "host", socket.gethostname())
    facts.add("place", "folder", Path.cwd())
    if notebook is None:
        facts.miss("place", "notebook", "the program that started this kernel does not say which notebook it is")
    else:
        facts.add("place", "notebook", notebook)


def run_record(learn: Any = None, *, optimizer: Any = None, loaders: Sequence[Any] | Any = (), code: bool = True) -> RunRecord:
    """Return the record of a run: seeds, data, split, hyper-parameters, model, code, versions, hardware, git.

    Nothing is drawn from a generator, no batch is taken, nothing is read from a device, and no code of the user's runs, not
    even a `repr`. Unknown facts are in the record with the reason; possible secrets are taken out. It takes about
    0.1 to 0.3 s, the first time somewhat longer; large data is hashed by pieces, files by their names and sizes, and git
    is waited for 2 s a question at most.

    Args:
        learn: a Learner or a torch module; if None, only the surroundings of a run are on record.
        optimizer: of a model that is no Learner's.
        loaders: torch's loaders of a model that is no Learner's, the training one first.
        code: False leaves the cells and the changes since the commit out; hashes of the user's modules stay.

    Raises:
        NbguardError: `learn` is neither a Learner nor a model.
    """
    return collect(ingredients_of(learn, optimizer, loaders), has_code=code)


def collect(ingredients: Ingredients, *, is_fit: bool = False, has_code: bool = True) -> RunRecord:
    """Return the record of a run with these ingredients.

    Args:
        ingredients: of the fit.
        is_fit: whether the cell that runs now is the one that fits.
        has_code: whether cells and changes since the commit belong to it.
    """
    started = time.perf_counter()
    facts, notebook = FactCollector(), Notebook.current()
    path = notebook_path(notebook.namespace)
    folder = Path.cwd()
    facts.attempt("generators", "libraries", lambda: collect_generators(facts))  # first: they show the moment of the call
    facts.attempt("seeds", "libraries", lambda: collect_seeds(facts, notebook.inputs or None))
    facts.attempt("data", "sets", lambda: collect_data(facts, ingredients))
    facts.attempt("hyper-parameters", "learner", lambda: collect_learner(facts, ingredients.learn))
    facts.attempt("hyper-parameters", "optimizer", lambda: collect_optimizer(facts, ingredients.optimizer))
    facts.attempt("model", "model", lambda: collect_model(facts, ingredients.model))
    facts.attempt("loaders", "loaders", lambda: collect_loaders(facts, ingredients))
    facts.attempt("precision", "switches", lambda: collect_switches(facts))
    facts.attempt("code", "modules", lambda: collect_modules(facts, folder))
    facts.attempt("versions", "distributions", lambda: collect_versions(facts))
    facts.attempt("hardware", "hardware", lambda: collect_hardware(facts))
    facts.attempt("variables", "environment", lambda: collect_variables(facts))
    facts.attempt("place", "place", lambda: collect_place(facts, path))
    names = names_of(notebook, ingredients.learn, ingredients.model, ingredients.optimizer, *ingredients.loaders)
    cells: list[RunCell] = []
    if has_code:
        facts.attempt("code", "cells", lambda: cells.extend(collect_cells(facts, notebook, names, path, is_fit=is_fit)))
    else:
        facts.miss("code", "cells", "the record was made without code")
    diff: list[str] = []
    facts.attempt("git", "state", lambda: diff.append(collect_git(facts, folder, has_code=has_code)))
    order = {topic: place for place, topic in enumerate(TOPICS)}
    return RunRecord(
        subject=ingredients.subject,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        facts=tuple(sorted(facts.facts, key=lambda fact: order[fact.topic])),
        missing=tuple(sorted(facts.missing, key=lambda each: order[each.topic])),
        cells=tuple(cells),
        diff="".join(diff),
        seconds=round(time.perf_counter() - started, 4),
    )
