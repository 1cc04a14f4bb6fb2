"""Environments as facts: one in which nothing stands out, to be changed in one place each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nbguard.memory.core.oom_facts import HostFacts
from nbguard.training.doctor.analysis.diagnosis import (
    Check,
    CheckFinding,
    DriverFacts,
    EnvironmentFacts,
    GpuFact,
    ProcessLimits,
    TorchFacts,
    variable_checks,
)
from nbguard.training.doctor.analysis.gpu_checks import gpu_checks, machine_checks, toolkit_checks
from nbguard.training.doctor.analysis.seed_checks import LearnerFacts, learner_checks
from nbguard.units import GiB

TORCH = TorchFacts(
    version="2.13.0+cu130",
    cuda="13.0",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
    cudnn_built=(9, 20, 0),
    cudnn_loaded=(9, 20, 0),
    nccl=(2, 28, 9),
    threads=8,
    matmul_precision="high",
)
HEALTHY = EnvironmentFacts(
    python="3.11.2",
    system="Linux 6.1 x86_64",
    torch=TORCH,
    driver=DriverFacts(version="580.65.06", cuda=(13, 0), gpus=(GpuFact(name="NVIDIA H100", capability=(9, 0)),)),
    host=HostFacts(total=64 * GiB, available=48 * GiB, shm_total=32 * GiB, shm_free=31 * GiB),
    limits=ProcessLimits(open_files=65536, open_files_most=65536),
    cores=8,
)


def environment(**changes: Any) -> EnvironmentFacts:
    """Return the healthy environment with changes; `torch_version=…` changes a field of PyTorch's."""
    torch = {name.removeprefix("torch_"): value for name, value in changes.items() if name.startswith("torch_")}
    others = {name: value for name, value in changes.items() if not name.startswith("torch_")}
    return replace(HEALTHY, torch=replace(TORCH, **torch), **others) if torch else replace(HEALTHY, **others)


def checks(facts: EnvironmentFacts, learner: LearnerFacts | None = None) -> tuple[Check, ...]:
    """Return all checks of tier 0."""
    return (
        *gpu_checks(facts),
        *machine_checks(facts),
        *toolkit_checks(facts),
        *variable_checks(facts),
        *learner_checks(learner, facts),
    )


def findings(facts: EnvironmentFacts, learner: LearnerFacts | None = None) -> list[CheckFinding]:
    """Return all findings of tier 0."""
    return [finding for check in checks(facts, learner) for finding in check.findings]
