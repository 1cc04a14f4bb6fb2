"""Checks of the driver, the GPUs, the PyTorch build that is to run on them, and builds of extensions with CUDA code."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from nbguard.memory.core.advice import end_workers
from nbguard.texts import before_start
from nbguard.training.doctor.analysis.diagnosis import (
    Capability,
    Check,
    CheckFinding,
    CompilerFacts,
    EnvironmentFacts,
    Toolkit,
    checked,
    not_checked,
)
from nbguard.units import GiB, MiB, counted, format_bytes

# --- Checks of the host, on shared memory, limits, the container, threads.


_SHM = "/dev/shm"  # noqa: S108 - read, never written to
_CONTAINER_SHM = 64 * MiB
"""Bytes of /dev/shm in a container that nobody asked for more."""
_FEW_FILES = 2048
"""Open files below which loaders with several workers run out: a tensor that a worker sends is an open file."""
_FEW_PROCESSES = 256
_TIGHT = 0.1
"""Share of a container's memory that is little when no more is left."""


def machine_checks(facts: EnvironmentFacts) -> tuple[Check, ...]:
    """Return the checks of the host."""
    return (_shared_memory(facts), _limits(facts), _container(facts), _threads(facts))


def _shared_memory(facts: EnvironmentFacts) -> Check:
    name, total, free = _SHM, facts.host.shm_total, facts.host.shm_free
    if total is None or free is None:
        return not_checked("environment", name, "there is no /dev/shm here")
    evidence = f"{format_bytes(free)} free of {format_bytes(total)}"
    command = "docker run --shm-size=8g …   # or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    if total <= _CONTAINER_SHM:
        finding = CheckFinding(
            severity="advice",
            what=f"{_SHM} has {format_bytes(total)}, so loaders with workers can die with a bus error",
            evidence="workers hand their batches over in shared memory; this is Docker's default size",
            command=command,
        )
        return checked("environment", name, evidence, finding)
    if free < min(GiB // 4, total // 10):
        finding = CheckFinding(
            severity="advice",
            what=f"{_SHM} is nearly full: {format_bytes(free)} of {format_bytes(total)} are free",
            evidence="workers hand their batches over in shared memory",
            command=end_workers().command,
        )
        return checked("environment", name, evidence, finding)
    return checked("environment", name, evidence)


def _limits(facts: EnvironmentFacts) -> Check:
    limits, findings = facts.limits, []
    if limits.open_files is not None and limits.open_files < _FEW_FILES:
        most = limits.open_files_most
        new = _FEW_FILES * 32 if most is None else most
        findings.append(
            CheckFinding(
                severity="advice" if new > limits.open_files else "note",
                what=f"this process may open only {limits.open_files} files, so loaders with workers can fail",
                evidence="'too many open files': each tensor sent by a worker is an open file until it is freed",
                command=f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({new}, {new}))"
                if new > limits.open_files
                else 'torch.multiprocessing.set_sharing_strategy("file_system")',
            )
        )
    if facts.has_infiniband and limits.locked_memory is not None:
        findings.append(
            CheckFinding(
                severity="advice",
                what=(
                    f"this process may lock {format_bytes(limits.locked_memory)}, but InfiniBand locks all memory that it sends"
                ),
                evidence="/sys/class/infiniband has a device; NCCL fails there with 'cannot register memory'",
                command="docker run --ulimit memlock=-1 …   # or `ulimit -l unlimited` " + before_start(),
            )
        )
    if limits.processes is not None and limits.processes < _FEW_PROCESSES:
        findings.append(
            CheckFinding(
                severity="advice",
                what=f"only {limits.processes} processes and threads are allowed here",
                evidence="each worker of a loader has its own threads",
                command="docker run --pids-limit=-1 …",
            )
        )
    address = facts.host.address_limit
    if address is not None:
        findings.append(
            CheckFinding(
                severity="advice",
                what=f"the address space is limited to {format_bytes(address)}, but CUDA reserves far more than it uses",
                evidence="RLIMIT_AS counts addresses, not memory",
                command="ulimit -v unlimited   # " + before_start(),
            )
        )
    files = "?" if limits.open_files is None else f"{limits.open_files}"
    return checked("environment", "limits", f"{files} open files", *findings)


def _container(facts: EnvironmentFacts) -> Check:
    limit, room = facts.host.group_limit, facts.host.group_room
    if limit is None or room is None:
        return checked("environment", "container", "no container limits this process's memory")
    evidence = f"{format_bytes(room)} left of {format_bytes(limit)}"
    if room < _TIGHT * limit:
        finding = CheckFinding(
            severity="advice",
            what=f"the container is nearly full: {evidence}",
            evidence="above its limit the kernel ends a process with no message but 'Killed'",
            command=end_workers().command,
        )
        return checked("environment", "container", evidence, finding)
    return checked("environment", "container", evidence)


def _threads(facts: EnvironmentFacts) -> Check:
    if facts.torch is None:
        return not_checked("environment", "threads", "PyTorch is not imported: import torch, then run it again")
    threads, cores = facts.torch.threads, facts.cores
    evidence = f"{counted(threads, 'thread')} of PyTorch, {counted(cores, 'core')} may be used"
    if threads > cores:
        finding = CheckFinding(
            severity="advice",
            what=f"PyTorch computes with {counted(threads, 'thread')} on {counted(cores, 'core')}",
            evidence="a container or an affinity mask gives this process fewer cores than the machine has",
            command=f"torch.set_num_threads({cores})",
        )
        return checked("environment", "threads", evidence, finding)
    return checked("environment", "threads", evidence)


NO_TORCH = "PyTorch is not imported: import torch, then run it again"
_GET = "pytorch.org/get-started"


def gpu_checks(facts: EnvironmentFacts) -> tuple[Check, ...]:
    """Return the checks of obstacles between a GPU and PyTorch."""
    return (_driver(facts), _architectures(facts), _libraries(facts), _precision(facts), _initialised(facts))


def _no_gpu(facts: EnvironmentFacts) -> str:
    return (facts.driver.reason or "the driver lists no GPU").partition(":")[0]


def _driver(facts: EnvironmentFacts) -> Check:
    driver, torch = facts.driver, facts.torch
    if torch is None:
        return not_checked("environment", "driver and CUDA", NO_TORCH)
    build = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "no GPU"
    if not driver.gpus:
        return not_checked("environment", "driver and CUDA", _no_gpu(facts))
    names = ", ".join(gpu.name for gpu in driver.gpus)
    known = f"driver {driver.version or '?'} runs CUDA up to {dotted(driver.cuda)}; {names}; PyTorch is built for {build}"
    if not torch.cuda and not torch.hip:
        return checked(
            "environment",
            "driver and CUDA",
            known,
            CheckFinding(
                severity="problem",
                what="this PyTorch has no CUDA, although the machine has an NVIDIA GPU",
                evidence=f"PyTorch {torch.version} is a build for CPUs; {names} stands idle",
                command=f"# install the build for CUDA {dotted(driver.cuda)} or older from {_GET}, then restart the kernel",
            ),
        )
    if torch.cuda and driver.cuda is not None and major(torch.cuda) > driver.cuda[0]:
        return checked(
            "environment",
            "driver and CUDA",
            known,
            CheckFinding(
                severity="problem",
                what=f"the driver runs CUDA up to {dotted(driver.cuda)}, and this PyTorch is built for {torch.cuda}",
                evidence=f"driver {driver.version}; a newer major version of CUDA needs a newer driver",
                command=f"# install a newer driver, or the PyTorch build for CUDA {driver.cuda[0]} from {_GET}",
            ),
        )
    return checked("environment", "driver and CUDA", known)


def _architectures(facts: EnvironmentFacts) -> Check:
    name, torch = "GPU and build", facts.torch
    if torch is None:
        return not_checked("environment", name, NO_TORCH)
    if not facts.driver.gpus:
        return not_checked("environment", name, _no_gpu(facts))
    gpus = [gpu for gpu in facts.driver.gpus if gpu.capability is not None]
    if not gpus or not torch.architectures:
        return not_checked("environment", name, "no NVIDIA GPU reports its compute capability, or the build has no CUDA")
    lacking = [gpu for gpu in gpus if gpu.capability is not None and not runs_on(gpu.capability, torch.architectures)]
    built = " ".join(torch.architectures)
    shown = ", ".join(f"{gpu.name} {dotted(gpu.capability)}" for gpu in gpus)
    return checked(
        "environment",
        name,
        f"{shown}; the build has {built}",
        *(
            CheckFinding(
                severity="problem",
                what=f"this PyTorch has no code for {gpu.name}",
                evidence=f"its compute capability is {dotted(gpu.capability)}; the build has {built}",
                command=f"# install a PyTorch build whose torch.cuda.get_arch_list() names it, from {_GET}",
            )
            for gpu in lacking
        ),
    )


def runs_on(capability: Capability, architectures: tuple[str, ...]) -> bool:
    """Say whether a build has code for a GPU: machine code of its major version, or portable code of an older one.

    The rule of `torch.cuda._check_cubins`; machine code of sm_90a runs on 9.0 alone.
    """
    for architecture in architectures:
        kind, _, digits = architecture.partition("_")
        number = digits.rstrip("af")
        if not number.isdigit():
            continue
        built = int(number[:-1]), int(number[-1])
        if kind == "sm" and built == capability:
            return True
        if kind == "sm" and number == digits and built[0] == capability[0] and built[1] <= capability[1]:
            return True
        if kind == "compute" and built <= capability:
            return True
    return False


def _libraries(facts: EnvironmentFacts) -> Check:
    name, torch = "cuDNN, NCCL, cuBLAS", facts.torch
    if torch is None:
        return not_checked("environment", name, NO_TORCH)
    if not torch.cuda:
        return not_checked("environment", name, "this PyTorch is built without CUDA")
    findings = []
    if torch.cudnn_built and torch.cudnn_loaded and torch.cudnn_built[0] != torch.cudnn_loaded[0]:
        findings.append(
            CheckFinding(
                severity="problem",
                what=f"cuDNN {dotted(torch.cudnn_loaded)} is loaded, PyTorch was built for {dotted(torch.cudnn_built)}",
                evidence="convolutions fail because another major version has other functions",
                command="unset LD_LIBRARY_PATH  # " + before_start() + ": the wheel brings its own cuDNN",
            )
        )
    strangers = [(library, path) for library, path in facts.libraries if "site-packages" not in path]
    if strangers:
        findings.append(
            CheckFinding(
                severity="note",
                what=f"{', '.join(sorted({library for library, _ in strangers}))} is the system's, not PyTorch's own",
                evidence="; ".join(sorted({path for _, path in strangers})[:3]),
                command="unset LD_LIBRARY_PATH  # " + before_start() + ", unless that is meant",
            )
        )
    versions = f"cuDNN {dotted(torch.cudnn_loaded or torch.cudnn_built)} · NCCL {dotted(torch.nccl)}"
    return checked("environment", name, versions, *findings)


def _precision(facts: EnvironmentFacts) -> Check:
    name, torch = "TensorFloat-32", facts.torch
    if torch is None:
        return not_checked("environment", name, NO_TORCH)
    if not facts.driver.gpus:
        return not_checked("environment", name, _no_gpu(facts))
    capable = [gpu for gpu in facts.driver.gpus if gpu.capability is not None and gpu.capability >= (8, 0)]
    if not capable:
        return not_checked("environment", name, "no GPU here supports it (compute capability 8.0 and newer)")
    precision = f"products of float32 matrices: {torch.matmul_precision}"
    if torch.matmul_precision != "highest":
        return checked("environment", name, precision)
    return checked(
        "environment",
        name,
        precision,
        CheckFinding(
            severity="note",
            what="products of float32 matrices do not use the tensor cores",
            evidence=f"{capable[0].name} has TensorFloat-32, with 10 bits of mantissa instead of 23; autocast is not affected",
            command='torch.set_float32_matmul_precision("high")',
        ),
    )


def _initialised(facts: EnvironmentFacts) -> Check:
    name, torch = "start of CUDA", facts.torch
    if torch is None:
        return not_checked("environment", name, NO_TORCH)
    where = f" by {facts.cuda_line}" if facts.cuda_line else ""
    fresh = "# restart the kernel, and call notebook_launcher before anything is put on the GPU"
    if torch.is_bad_fork:
        return checked(
            "environment",
            name,
            "this process was forked after CUDA had been initialised",
            CheckFinding(
                severity="problem",
                what="CUDA cannot be used in this process because its parent initialised CUDA before the fork",
                evidence="`torch.cuda._is_in_bad_fork()` is True",
                command=fresh,
            ),
        )
    if torch.has_context:
        return checked(
            "environment",
            name,
            f"CUDA was initialised{where}",
            CheckFinding(
                severity="note",
                what=f"CUDA was initialised{where}, so `notebook_launcher` can no longer fork this kernel",
                evidence="a forked child cannot use its parent's context; one process with one GPU is not affected",
                command=fresh,
            ),
        )
    if facts.has_driver_open:
        return checked(
            "environment",
            name,
            "/dev/nvidia-uvm is open, and PyTorch has no context",
            CheckFinding(
                severity="note",
                what="CUDA's driver is initialised, so `notebook_launcher` cannot fork this kernel safely",
                evidence="/dev/nvidia-uvm is open in this process: `torch.cuda.is_available()`, or another library, opens it",
                command=fresh,
            ),
        )
    if facts.has_accelerator_state:
        return checked(
            "environment",
            name,
            "accelerate has been set up in this process",
            CheckFinding(
                severity="note",
                what="an Accelerator was made in this notebook, so `notebook_launcher` refuses to start",
                evidence="`AcceleratorState` is filled",
                command="# restart the kernel, and make the Accelerator inside of the launched function",
            ),
        )
    return checked("environment", name, "CUDA is not initialised in this process, so it can be forked")


def dotted(version: tuple[int, ...] | None) -> str:
    """Return a version as it is written; "?" for none."""
    return ".".join(map(str, version)) if version else "?"


def major(version: str) -> int:
    """Return the first number of a version; 0 where it has none."""
    digits = version.partition(".")[0]
    return int(digits) if digits.isdigit() else 0


# --- Whether extensions with CUDA code, such as Apex, would build here, by toolkit, PyTorch's build, compiler, driver.


_NAME = "CUDA toolkit"
_ONLY = "matters only to extensions that are compiled here, such as Apex or flash-attn"


def toolkit_checks(facts: EnvironmentFacts) -> tuple[Check, ...]:
    """Return the check of the toolkit that PyTorch would compile an extension with."""
    return (_toolkit(facts),)


def _toolkit(facts: EnvironmentFacts) -> Check:
    torch, toolkits = facts.torch, facts.toolkit.toolkits
    if torch is None:
        return not_checked("environment", _NAME, NO_TORCH)
    if not torch.cuda:
        return not_checked("environment", _NAME, "this PyTorch is built without CUDA")
    if facts.system.startswith("Windows"):
        return not_checked("environment", _NAME, "the compilers of Windows are not known here")
    if not toolkits:
        return checked("environment", _NAME, f"none, so nothing like Apex can be compiled; PyTorch {torch.version} needs none")
    taken, compiler = toolkits[0], facts.toolkit.compiler
    nvcc = f"nvcc {dotted(taken.version)}" if taken.has_nvcc else "no nvcc"
    built_by = "no C++ compiler" if compiler is None else f"{compiler.path} {dotted(compiler.version)}"
    driver = f"; the driver runs CUDA up to {dotted(facts.driver.cuda)}" if facts.driver.cuda else ""
    evidence = f"{nvcc} in {taken.home}, {built_by}; PyTorch is built for CUDA {torch.cuda}{driver}"
    return checked("environment", _NAME, evidence, *_findings(facts, taken, torch.cuda))


def _findings(facts: EnvironmentFacts, taken: Toolkit, cuda: str) -> Iterator[CheckFinding]:
    whose = "CUDA_HOME" if facts.toolkit.is_given else "the toolkit that PyTorch finds"
    other = _other(facts, cuda)
    if not _is_whole(taken):
        which, lacks = (" that use CUDA's headers", "cuda_runtime.h") if taken.has_nvcc else ("", "bin/nvcc")
        yield _finding(f"extensions{which} cannot be compiled because {whose}, {taken.home}, has no {lacks}", _ONLY, other)
    elif taken.version is not None and taken.version[0] != major(cuda):
        nvcc = dotted(taken.version)
        what = f"extensions cannot be compiled because nvcc is of CUDA {nvcc} and this PyTorch is built for {cuda}"
        yield _finding(what, f"PyTorch refuses another major version; it {_ONLY}", other)
    else:
        yield from _driver_of_toolkit_checks(facts, taken)
    yield from _compiler(facts.toolkit.compiler, facts.toolkit.numbered, taken)


def _driver_of_toolkit_checks(facts: EnvironmentFacts, taken: Toolkit) -> Iterator[CheckFinding]:
    """Yield that portable code of this nvcc is newer than the driver. Machine code of the same major version runs."""
    newest, gpu = facts.driver.cuda, next((gpu for gpu in facts.driver.gpus if gpu.capability), None)
    if newest is None or taken.version is None or gpu is None or taken.version[:2] <= newest:
        return
    yield _finding(
        f"extensions that hold portable code (PTX) cannot start, because nvcc is newer than the driver's CUDA {dotted(newest)}",
        f"nvcc {dotted(taken.version)}, driver {facts.driver.version}; 'unsupported toolchain' is the error. It {_ONLY}",
        f'export TORCH_CUDA_ARCH_LIST="{dotted(gpu.capability)}"   # before the build: code for {gpu.name} alone',
    )


def _compiler(compiler: CompilerFacts | None, numbered: tuple[int, ...], taken: Toolkit) -> Iterator[CheckFinding]:
    if compiler is None:
        yield _finding("extensions cannot be compiled because there is no C++ compiler", _ONLY, "# apt-get install g++")
        return
    limit, version = taken.newest_gcc, compiler.version
    if not compiler.is_gcc or limit is None or version is None or version[0] <= limit:
        return
    older = next((number for number in numbered if number <= limit), None)
    yield _finding(
        f"extensions cannot be compiled because nvcc takes GCC up to {limit}, and the compiler is GCC {version[0]}",
        f"{compiler.path} {dotted(version)}; it {_ONLY}",
        f"# apt-get install g++-{limit}, then export CC=gcc-{limit} CXX=g++-{limit}"
        if older is None
        else f"export CC=gcc-{older} CXX=g++-{older}   # before the build",
    )


def _other(facts: EnvironmentFacts, cuda: str) -> str:
    """Return the line that takes another toolkit of this machine, of PyTorch's own version if there is one."""
    fitting = [
        each for each in facts.toolkit.toolkits[1:] if _is_whole(each) and each.version and each.version[0] == major(cuda)
    ]
    best = next((each for each in fitting if each.version and dotted(each.version[:2]) == cuda), None)
    taken = best or next(iter(fitting), None)
    if taken is None:
        return f"# install the CUDA toolkit {cuda} as well, then export CUDA_HOME with its folder"
    home = shlex.quote(taken.home)
    return f'export CUDA_HOME={home} PATH={home}/bin:"$PATH"   # before the build'


def _is_whole(toolkit: Toolkit) -> bool:
    return toolkit.has_nvcc and toolkit.has_headers


def _finding(what: str, evidence: str, command: str) -> CheckFinding:
    return CheckFinding(severity="note", what=what, evidence=evidence, command=command)
