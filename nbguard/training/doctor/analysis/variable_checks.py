"""Checks of variables of the environment, for obsolete names, contradictions, switches for finding errors."""

from __future__ import annotations

from collections.abc import Iterator

from nbguard.errors import SettingsError
from nbguard.memory.allocator.model.settings import AllocatorSettings, parse_version
from nbguard.texts import before_start
from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, checked
from nbguard.training.doctor.analysis.environment import EnvironmentFacts

_NEW = "PYTORCH_ALLOC_CONF"
_OLD = {"cuda": "PYTORCH_CUDA_ALLOC_CONF", "hip": "PYTORCH_HIP_ALLOC_CONF"}
_NEW_SINCE = (2, 9)
"""The version of PyTorch that reads `PYTORCH_ALLOC_CONF`."""

_RENAMED = {
    "NCCL_ASYNC_ERROR_HANDLING": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "NCCL_BLOCKING_WAIT": "TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_ENABLE_TIMING": "TORCH_NCCL_ENABLE_TIMING",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "TORCH_FR_BUFFER_SIZE",
}
"""Names that PyTorch read once, and the names that it reads now."""

_DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel and prepares nothing while the GPU works",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "each tensor takes a cudaMalloc and a cudaFree, which is many times slower, and nothing is recorded"
    ),
}
"""Switches for finding errors, and their price."""


def variable_checks(facts: EnvironmentFacts) -> tuple[Check, ...]:
    """Return the checks of variables."""
    allocator = tuple(_allocator(facts))
    names = [name for name in (_NEW, *_OLD.values()) if name in facts.variable]
    conf = ", ".join(f"{name}={facts.variable[name]}" for name in names) or "PyTorch's defaults"
    others = [*_renamed(facts), *_debugging(facts), *_nccl_log(facts), *_openmp(facts), *_libraries(facts)]
    count = len(facts.variables)
    return (
        checked("environment", "allocator", conf, *allocator),
        checked("environment", "variables", f"{count or 'none'} that CUDA, PyTorch, NCCL or OpenMP read", *others),
    )


def _allocator(facts: EnvironmentFacts) -> Iterator[CheckFinding]:
    variables, torch = facts.variable, facts.torch
    version = None if torch is None else parse_version(torch.version)
    old = _OLD["hip"] if torch is not None and torch.hip else _OLD["cuda"]
    reads_new = version is None or version >= _NEW_SINCE
    if _NEW in variables and old in variables and _plain(variables[_NEW]) != _plain(variables[old]):
        yield CheckFinding(
            severity="problem",
            what=f"{_NEW} and {old} say different things",
            evidence=f"{_NEW}={variables[_NEW]}; {old}={variables[old]}",
            command=f'import os; del os.environ["{old if reads_new else _NEW}"]   # then restart the kernel',
        )
    elif old in variables and version is not None and reads_new:
        yield CheckFinding(
            severity="note",
            what=f"{old} is the old name of {_NEW}",
            evidence=f"PyTorch {torch.version if torch else ''} still reads it",
            command=f'unset {old}; export {_NEW}="{variables[old]}"   # ' + before_start()
            if _is_accepted(variables[old], version)
            else f"unset {old}   # " + before_start() + f"; {_NEW} has its place, with settings that PyTorch knows",
        )
    for name in (_NEW, old):
        if name in variables:
            yield from _settings(name, variables[name], version)
    if torch is not None and not torch.hip and _OLD["hip"] in variables:
        yield CheckFinding(
            severity="note",
            what=f"{_OLD['hip']} is read by ROCm's builds only",
            evidence=f"this PyTorch is built for {'CUDA' if torch.cuda else 'CPUs'}",
            command=f'import os; del os.environ["{_OLD["hip"]}"]',
        )


def _settings(name: str, text: str, version: tuple[int, int] | None) -> Iterator[CheckFinding]:
    """Yield the faults of the allocator's settings in a variable."""
    try:
        settings = AllocatorSettings.parse(text, version)
    except SettingsError as error:
        yield CheckFinding(
            severity="problem",
            what=f"{name} cannot be used as it is",
            evidence=str(error),
            command=f'import os; del os.environ["{name}"]   # then restart the kernel',
        )
        return
    if settings.expandable and settings.max_split_size is not None:
        yield CheckFinding(
            severity="advice",
            what=f"{name} sets expandable_segments and max_split_size_mb, which work against each other",
            evidence="a block above the limit is never split, and an expandable segment is one large block",
            command=f'export {name}="expandable_segments:True"   # ' + before_start(),
        )


def _is_accepted(text: str, version: tuple[int, int] | None) -> bool:
    """Say whether PyTorch takes settings as they are, as refused ones are no advice."""
    try:
        AllocatorSettings.parse(text, version)
    except SettingsError:
        return False
    return True


def _plain(text: str) -> str:
    return "".join(text.split())


def _renamed(facts: EnvironmentFacts) -> Iterator[CheckFinding]:
    for old, new in _RENAMED.items():
        if old in facts.variable:
            value = facts.variable[old]
            yield CheckFinding(
                severity="advice",
                what=f"{old} is an obsolete name; PyTorch reads {new}",
                evidence=f"{old}={value} is set" + (f", {new} too" if new in facts.variable else f", {new} is not"),
                command=f'import os; os.environ["{new}"] = os.environ.pop("{old}")   # before the process group is made',
            )


def _debugging(facts: EnvironmentFacts) -> Iterator[CheckFinding]:
    for name, price in _DEBUGGING.items():
        value = facts.variable.get(name, "0")
        if _is_on(value):
            yield CheckFinding(
                severity="advice",
                what=f"{name}={value} is a switch for finding errors",
                evidence=price,
                command=f'import os; del os.environ["{name}"]   # then restart the kernel',
            )
    if facts.variable.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield CheckFinding(
            severity="advice",
            what="TORCH_DISTRIBUTED_DEBUG=DETAIL compares every collective between all ranks first",
            evidence="it is slow, and with DistributedDataParallel on gloo it ends every rank in PyTorch 2.13",
            command='import os; os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"   # before the process group is made',
        )


def _nccl_log(facts: EnvironmentFacts) -> Iterator[CheckFinding]:
    """Yield the finding that NCCL's log goes to the ranks' common output, where `watch_ranks` cannot read it."""
    level = facts.variable.get("NCCL_DEBUG", "").upper()
    if level in ("WARN", "INFO", "TRACE") and not facts.variable.get("NCCL_DEBUG_FILE"):
        yield CheckFinding(
            severity="note",
            what="NCCL logs to the standard output of all ranks",
            evidence=f"NCCL_DEBUG={level}, and no NCCL_DEBUG_FILE is set; `nbguard.watch_ranks` reads such a file of each rank",
            command='import os; os.environ["NCCL_DEBUG_FILE"] = "/tmp/nccl.%h.%p"   # before the process group is made',
        )


def _is_on(value: str) -> bool:
    """Say whether a variable with this value switches something on."""
    return value.lower() not in ("0", "", "false", "off")


def _openmp(facts: EnvironmentFacts) -> Iterator[CheckFinding]:
    """Yield that two runtimes compute side by side. Alone the variable says nothing: scikit-learn sets it on import."""
    name = "KMP_DUPLICATE_LIB_OK"
    if len(facts.openmp) > 1 and _is_on(facts.variable.get(name, "0")):
        yield CheckFinding(
            severity="advice",
            what=f"two OpenMP runtimes are loaded, and {name} lets them be",
            evidence=f"{'; '.join(facts.openmp[:3])}: Intel says that such a process may compute wrong results",
            command="# install PyTorch, numpy and scikit-learn from one source: all by pip, or all by conda",
        )


def _libraries(facts: EnvironmentFacts) -> Iterator[CheckFinding]:
    if "apex.amp" in facts.modules:
        yield CheckFinding(
            severity="advice",
            what="NVIDIA Apex's `amp` is imported, although PyTorch's own replaced it",
            evidence="apex.amp is no longer maintained; its patches do not work with torch.autocast",
            command="learn.to_fp16()   # fastai; in a loop: torch.autocast and torch.amp.GradScaler",
        )
