"""A diagnosis of checks with their evidence, the findings that stand out with their commands, and its view as blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

from nbguard.errors import SettingsError
from nbguard.memory.allocator.model.settings import AllocatorSettings, parse_version
from nbguard.memory.core.oom_facts import HostFacts
from nbguard.render.html import Block, FactLines, Listing, Point, Points, Table, TableRow, Title
from nbguard.render.result import Result
from nbguard.texts import Host, before_start, form
from nbguard.units import counted

Topic = Literal["environment", "determinism", "export", "ranks"]
TOPICS: tuple[Topic, ...] = get_args(Topic)
DIAGNOSE_TOPICS: tuple[Topic, ...] = ("environment", "determinism", "export")
"""Topics of `nbguard.diagnose`, in the order of its report; ranks have `nbguard.diagnose_launch`."""

Severity = Literal["note", "advice", "problem"]
State = Literal["ok", "note", "advice", "problem", "not checked"]

SEVERITIES: tuple[Severity, ...] = ("problem", "advice", "note")
"""From the gravest down."""


def chosen(topics: Collection[str], golden: str | None = None, max_latency: str | None = None) -> dict[str, Any]:
    """Return the topics of `nbguard.diagnose` as its arguments; the named ones are on, and all if none is named.

    With `golden` or `max_latency`, which are about exports, these are on, and alone where no topic is named.
    """
    asked = {"golden": golden, "max_latency": max_latency}
    default = ("export",) if any(asked.values()) else DIAGNOSE_TOPICS
    named = {*(topics or default), *(default if any(asked.values()) else ())}
    return {**{topic: topic in named for topic in DIAGNOSE_TOPICS}, **asked}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """One thing that stands out. Code stands between backticks."""

    severity: Severity  # how much it matters
    what: str  # the fact in one sentence
    evidence: str  # the figure that it rests on
    command: str  # the one command that does something about it, or lines to paste; empty without one


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One question that was asked, and its answer."""

    topic: Topic
    name: str  # the subject of the question, in a word or two
    state: State  # that of its gravest finding; "not checked" is no "ok"
    evidence: str  # the examined figures; where it was not checked, the reason
    findings: tuple[CheckFinding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis(Result):
    """The answers to all questions that were asked, in their order."""

    kind: ClassVar[str] = "diagnosis"
    view: ClassVar[str] = "nbguard.training.doctor.analysis.diagnosis:diagnosis_blocks"
    label: ClassVar[str] = "Diagnosis"

    subject: str  # the Learner or model that was tried, by its class; empty if none was given
    checks: tuple[Check, ...]  # by topic, in the order of making
    has_gpu: bool | None = None  # whether the driver names an NVIDIA GPU; None if it was not asked
    notes: tuple[str, ...] = ()  # parts that the checks could not examine or put back, in words
    seconds: float = 0.0  # that the checks took

    @property
    def findings(self) -> tuple[CheckFinding, ...]:
        """Return the findings of all checks, the gravest first."""
        each = [finding for check in self.checks for finding in check.findings]
        return tuple(sorted(each, key=lambda finding: SEVERITIES.index(finding.severity)))

    @property
    def worst(self) -> Severity | None:
        """Return the severity of the gravest finding; None if nothing stands out."""
        return min((finding.severity for finding in self.findings), key=SEVERITIES.index, default=None)

    def said(self, where: Host) -> Diagnosis:
        """Return the same with the evidence of each check as it is said to a host, for its JSON, too."""
        checks = (replace(each, evidence=form(each.evidence, where)) for each in self.checks)
        return replace(self, checks=tuple(checks))


def checked(topic: Topic, name: str, evidence: str, *findings: CheckFinding) -> Check:
    """Return a check that was made, in the state of its gravest finding."""
    state: State = min((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")
    return Check(topic=topic, name=name, state=state, evidence=evidence, findings=findings)


def not_checked(topic: Topic, name: str, reason: str) -> Check:
    """Return a check that could not be made, with the reason."""
    return Check(topic=topic, name=name, state="not checked", evidence=reason)


# --- A diagnosis as blocks, the verdict in a sentence, the findings with their commands, then every check.


_NOUNS: dict[Severity, tuple[str, ...]] = {
    "problem": ("problem",),
    "advice": ("piece of advice", "pieces of advice"),
    "note": ("note",),
}


def diagnosis_blocks(diagnosis: Diagnosis, *, whole: bool = False) -> Iterator[Block]:
    """Yield the verdict, the findings, the checks, and the parts left aside.

    `whole`: whether text, too, shows each check with its figures. HTML has them behind a line.
    """
    yield Title(_verdict(diagnosis), "strong")
    if diagnosis.findings:
        yield Points(tuple(map(_point, diagnosis.findings)), is_numbered=False)
    if diagnosis.checks:
        rows = tuple(TableRow(cells=(check.state, check.topic, check.name, check.evidence)) for check in diagnosis.checks)
        brief = None if whole else FactLines(tuple(_short(diagnosis.checks)))
        yield Table(rows=rows, chips=(0,), fold=counted(len(rows), "check"), brief=brief)
    if diagnosis.notes:
        yield Listing(sentences=diagnosis.notes)
    shown = "" if whole or not diagnosis.checks else "; `--all` shows their figures"
    yield Title(f"{counted(len(diagnosis.checks), 'check')} in {diagnosis.seconds:.2g} s{shown}", "dim")


def _verdict(diagnosis: Diagnosis) -> str:
    where = diagnosis.subject or "this machine"
    missing = "; it has no NVIDIA GPU" if diagnosis.has_gpu is False and not diagnosis.subject else ""
    if not diagnosis.checks:
        return f"Nothing was asked about {where}"
    if all(check.state == "not checked" for check in diagnosis.checks):
        return f"Nothing could be checked {'of' if diagnosis.subject else 'on'} {where}{missing}"
    found = Counter(finding.severity for finding in diagnosis.findings)
    counts = [counted(found[severity], *_NOUNS[severity]) for severity in SEVERITIES if found[severity]]
    if not counts:
        return f"No problem found {'in' if diagnosis.subject else 'on'} {where}{missing}"
    return f"{where[0].upper()}{where[1:]}: {', '.join(counts)}{missing}"


def _short(checks: Iterable[Check]) -> Iterator[tuple[str, str]]:
    """Yield a line of the checks that are in order, and one for each reason why others were not made."""
    fine = [check.name for check in checks if check.state == "ok"]
    if fine:
        yield "in order", ", ".join(fine)
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for check in checks:
        if check.state == "not checked":
            reasons[check.evidence].append(check.name)
    for reason, names in reasons.items():
        yield "not checked", f"{', '.join(names)}: " + reason


def _point(finding: CheckFinding) -> Point:
    """Return a finding with its evidence, and each line of its command by itself."""
    lines = [finding.evidence, *("→ `" + line + "`" for line in finding.command.splitlines() if line.strip())]
    return Point(
        word=finding.severity,
        what=finding.what,
        lines=tuple(line for line in lines if line),
        warns=finding.severity == "problem",
    )


# --- Facts of the machine, the process and the libraries, read once, without importing or initialising anything.


Capability = tuple[int, int]
"""The compute capability of an NVIDIA GPU: (9, 0) for an H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFact:
    """A GPU as the driver names it."""

    name: str
    capability: Capability | None = None  # `nvmlDeviceGetCudaComputeCapability`; None if the driver does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """The NVIDIA driver, as NVML and /proc tell."""

    version: str = ""  # such as 580.65.06; empty without one, or it does not answer
    cuda: tuple[int, int] | None = None  # newest CUDA that it runs (`nvmlSystemGetCudaDriverVersion_v2`)
    gpus: tuple[GpuFact, ...] = ()
    reason: str = ""  # why it is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """PyTorch as it is imported in this process."""

    version: str  # torch.__version__
    cuda: str = ""  # torch.version.cuda: it was built for this CUDA; empty for none
    hip: str = ""  # torch.version.hip, likewise of ROCm
    architectures: tuple[str, ...] = ()  # `torch._C._cuda_getArchFlags`: sm_90, compute_90, …
    cudnn_built: tuple[int, ...] | None = None  # version that it was compiled against
    cudnn_loaded: tuple[int, ...] | None = None  # version that is loaded
    nccl: tuple[int, ...] | None = None  # version of NCCL that it was built with
    threads: int = 1  # torch.get_num_threads()
    matmul_precision: str = "highest"  # torch.get_float32_matmul_precision()
    has_context: bool = False  # torch.cuda.is_initialized()
    is_bad_fork: bool = False  # a child of a process that had initialised CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits of this process; None stands for no limit, or one that cannot be read."""

    open_files: int | None = None  # RLIMIT_NOFILE, the soft one
    open_files_most: int | None = None  # the hard one, which the process may raise it to
    locked_memory: int | None = None  # bytes, RLIMIT_MEMLOCK
    processes: int | None = None  # the smaller of RLIMIT_NPROC and the container's pids.max


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolkit:
    """A folder that has, or is said to have, a CUDA toolkit."""

    home: str
    has_nvcc: bool = False  # bin/nvcc
    has_headers: bool = False  # include/cuda_runtime.h, or that of a target
    version: tuple[int, ...] | None = None  # of nvcc; None if it does not tell
    newest_gcc: int | None = None  # major version beyond which its headers refuse GCC


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerFacts:
    """The C++ compiler that PyTorch would take: that of CXX, else c++."""

    path: str
    is_gcc: bool = True
    version: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolkitFacts:
    """CUDA toolkits of the machine, and the compiler; all empty where there is no toolkit."""

    toolkits: tuple[Toolkit, ...] = ()  # the first is that which PyTorch would take
    is_given: bool = False  # by CUDA_HOME or CUDA_PATH
    compiler: CompilerFacts | None = None
    numbered: tuple[int, ...] = ()  # major versions of GCC on PATH by their own names, such as g++-12; from the newest down


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFacts:
    """All that tier 0 looks at."""

    python: str  # version
    system: str  # such as Linux-6.1-x86_64
    torch: TorchFacts | None  # None if PyTorch is not imported
    driver: DriverFacts
    host: HostFacts
    limits: ProcessLimits
    cores: int  # CPU cores that this process may use, by its affinity and its container's quota
    variables: tuple[tuple[str, str], ...] = ()  # of the environment, those that CUDA, PyTorch, NCCL and OpenMP read
    modules: frozenset[str] = field(default_factory=frozenset)  # of `WATCHED`, those that are imported
    libraries: tuple[tuple[str, str], ...] = ()  # (libcudnn, path) of CUDA's libraries that are mapped into the process
    openmp: tuple[str, ...] = ()  # paths of Intel's and LLVM's OpenMP runtimes that are
    toolkit: ToolkitFacts = field(default_factory=ToolkitFacts)
    has_infiniband: bool = False  # /sys/class/infiniband has a device
    has_driver_open: bool = False  # /dev/nvidia-uvm is open: CUDA's driver has been initialised in this process
    has_accelerator_state: bool = False  # accelerate's shared state exists: an Accelerator was made
    cuda_line: str = ""  # the line of the user's that initialised CUDA, where nbguard saw it

    @property
    def variable(self) -> dict[str, str]:
        """Return the variables by name."""
        return dict(self.variables)


WATCHED = ("apex", "apex.amp", "horovod", "accelerate")
"""Modules whose presence matters."""

PREFIXES = (
    "CUDA_",
    "CUDNN_",
    "CUBLAS_",
    "NCCL_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GLOO_",
    "LD_LIBRARY_PATH",
    "HIP_",
)
"""Beginnings of the names of variables that are read. No other variable is."""


# --- Checks of variables of the environment, for obsolete names, contradictions, switches for finding errors.


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
            command="learn.to_fp16()   # a Learner; in a loop: torch.autocast and torch.amp.GradScaler",
        )
