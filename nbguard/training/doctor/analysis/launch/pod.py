"""A pod of Kubernetes as ranks see it, with memory, cores, shared memory, GPUs."""

from __future__ import annotations

from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, checked
from nbguard.training.doctor.analysis.environment import EnvironmentFacts
from nbguard.training.doctor.analysis.launch.facts import LaunchFacts
from nbguard.training.ranks.analysis.launcher import POD, number
from nbguard.units import counted, format_bytes

_VISIBLE = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_NO_GPU = ("void", "none", "")
"""Values of NVIDIA_VISIBLE_DEVICES that give a container no GPU."""


def pod_checks(facts: LaunchFacts, environment: EnvironmentFacts) -> tuple[Check, ...]:
    """Return the check of the pod; none outside of Kubernetes."""
    if POD not in facts.variable:
        return ()
    host = environment.host
    limit = "no limit of memory" if host.group_limit is None else f"{format_bytes(host.group_limit)} of memory"
    shared = "no shared memory" if host.shm_total is None else f"{format_bytes(host.shm_total)} of shared memory"
    evidence = ", ".join((limit, counted(environment.cores, "core"), shared, _gpus(facts, environment)))
    return (checked("ranks", "pod", evidence, *_findings(facts, environment)),)


def _gpus(facts: LaunchFacts, environment: EnvironmentFacts) -> str:
    names = [gpu.name for gpu in environment.driver.gpus]
    given = [f"{name}={facts.variable[name]}" for name in _VISIBLE if name in facts.variable]
    known = f"{counted(len(names), 'GPU')} ({', '.join(dict.fromkeys(names))})" if names else "no GPU"
    return f"{known}; {', '.join(given)}" if given else known


def _findings(facts: LaunchFacts, environment: EnvironmentFacts) -> tuple[CheckFinding, ...]:
    gpus, ranks = len(environment.driver.gpus), number(facts.variable.get("LOCAL_WORLD_SIZE")) or 1
    if 0 < gpus < ranks:
        return (
            CheckFinding(
                severity="advice",
                what=f"the pod has {counted(gpus, 'GPU')} for {ranks} ranks",
                evidence=f"LOCAL_WORLD_SIZE={ranks}; ranks that share a GPU cannot use NCCL",
                command=f"torchrun --nproc-per-node={gpus} train.py   # or resources.limits: nvidia.com/gpu: {ranks}",
            ),
        )
    if not gpus and facts.variable.get("NVIDIA_VISIBLE_DEVICES", "all").lower() in _NO_GPU:
        return (
            CheckFinding(
                severity="note",
                what="the pod was given no GPU",
                evidence=f"NVIDIA_VISIBLE_DEVICES={facts.variable['NVIDIA_VISIBLE_DEVICES']}",
                command="# in the pod's manifest, at its container: resources: {limits: {nvidia.com/gpu: 1}}",
            ),
        )
    return ()
