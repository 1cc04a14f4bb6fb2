"""`nbguard.run_record`: the parts of a run, collected before it begins."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from nbguard.memory.scan.devices.host import dotted, library_versions, usable_cores
from nbguard.memory.scan.devices.nvml import NvmlReader
from nbguard.memory.scan.scan import Notebook
from nbguard.training.runs.analysis.record import TOPICS, RunCell, RunRecord
from nbguard.training.runs.analysis.secrets import HIDDEN, RECORDED_VARIABLES, is_secret_name, without_secrets
from nbguard.training.runs.code import collect_cells, collect_git, collect_modules, names_of, notebook_path
from nbguard.training.runs.collector import FactCollector
from nbguard.training.runs.data import collect_data
from nbguard.training.runs.random_state import collect_generators, collect_seeds
from nbguard.training.runs.settings import (
    Ingredients,
    collect_learner,
    collect_loaders,
    collect_model,
    collect_optimizer,
    ingredients_of,
)
from nbguard.units import format_bytes

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
