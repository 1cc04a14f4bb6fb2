"""`nbguard.diagnose_launch`: can ranks be launched here, and is this process the rank that its launcher meant."""

from __future__ import annotations

import time

from nbguard.training.doctor.analysis.diagnosis import Diagnosis
from nbguard.training.doctor.analysis.gpu_checks import gpu_checks
from nbguard.training.doctor.analysis.launch_checks import launch_checks, pod_checks
from nbguard.training.doctor.analysis.machine_checks import machine_checks
from nbguard.training.doctor.analysis.variable_checks import variable_checks
from nbguard.training.doctor.environment import environment_facts
from nbguard.training.doctor.launch import launch_facts, two_processes


def diagnose_launch(*, self_test: bool = False) -> Diagnosis:
    """Return whether ranks of a distributed job can be launched here or, in a rank, whether it is the intended one.

    Checked are the launcher, rank and number of ranks, the port and who listens at it, the address, the interfaces, and the
    environment as it matters to ranks: who initialised CUDA, shared memory, limits, obsolete variables. Nothing is changed.

    Args:
        self_test: whether two processes of this host try to work together over gloo, too: each imports PyTorch.
    """
    started = time.perf_counter()
    environment = environment_facts()
    launch = launch_facts()
    checks = launch_checks(launch, two_processes() if self_test else None)
    checks += (
        *pod_checks(launch, environment),
        *gpu_checks(environment),
        *machine_checks(environment),
        *variable_checks(environment),
    )
    return Diagnosis(subject="", checks=checks, seconds=time.perf_counter() - started)
