"""Checks of the host, on shared memory, limits, the container, threads."""

from __future__ import annotations

from nbguard.memory.core.advice import end_workers
from nbguard.texts import before_start
from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, checked, not_checked
from nbguard.training.doctor.analysis.environment import EnvironmentFacts
from nbguard.units import GiB, MiB, counted, format_bytes

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
