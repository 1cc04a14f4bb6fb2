"""Judgement of environments: each fault is named with its evidence and a command; a healthy one raises nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from nbguard.memory.allocator.model.settings import AllocatorSettings
from nbguard.memory.core.oom_facts import HostFacts
from nbguard.training.doctor.analysis.diagnosis import (
    CompilerFacts,
    DriverFacts,
    EnvironmentFacts,
    GpuFact,
    ProcessLimits,
    Toolkit,
    ToolkitFacts,
)
from nbguard.training.doctor.analysis.gpu_checks import runs_on, toolkit_checks
from nbguard.training.doctor.analysis.seed_checks import LearnerFacts, LoaderSettings, PrecisionFacts
from nbguard.units import GiB, MiB
from tests.doctor.environments import HEALTHY, checks, environment, findings

_LEARNER = LearnerFacts(loaders=(LoaderSettings(name="the training loader", workers=4, pins=True),), is_on_device=True)


def toolkit(version: tuple[int, ...] | None, **changes: Any) -> ToolkitFacts:
    taken = Toolkit(
        **{"home": "/opt/cuda", "has_nvcc": True, "has_headers": True, "version": version, "newest_gcc": 15, **changes}
    )
    return ToolkitFacts(toolkits=(taken,), compiler=CompilerFacts(path="/usr/bin/c++", version=(12, 2, 0)))


FAULTS: dict[str, tuple[EnvironmentFacts, str, str]] = {
    "CPU build": (environment(torch_cuda="", torch_architectures=()), "problem", "this PyTorch has no CUDA"),
    "old driver": (
        environment(driver=DriverFacts(version="525.60", cuda=(12, 0), gpus=HEALTHY.driver.gpus)),
        "problem",
        "the driver runs CUDA up to 12.0, and this PyTorch is built for 13.0",
    ),
    "no code for the GPU": (
        environment(driver=replace(HEALTHY.driver, gpus=(GpuFact(name="Tesla P100", capability=(6, 0)),))),
        "problem",
        "this PyTorch has no code for Tesla P100",
    ),
    "other cuDNN": (
        environment(torch_cudnn_loaded=(8, 9, 7)),
        "problem",
        "cuDNN 8.9.7 is loaded, PyTorch was built for 9.20.0",
    ),
    "the system's cuDNN": (
        environment(libraries=(("libcudnn", "/usr/lib/libcudnn.so.9"),)),
        "note",
        "libcudnn is the system's",
    ),
    "no TF32": (environment(torch_matmul_precision="highest"), "note", "do not use the tensor cores"),
    "initialised": (environment(torch_has_context=True, cuda_line="In[4], line 2"), "note", "initialised by In[4], line 2"),
    "bad fork": (environment(torch_is_bad_fork=True), "problem", "CUDA cannot be used in this process"),
    "others initialised": (environment(has_driver_open=True), "note", "CUDA's driver is initialised"),
    "Accelerator": (environment(has_accelerator_state=True), "note", "an Accelerator was made in this notebook"),
    "Docker's /dev/shm": (
        environment(host=HostFacts(shm_total=64 * MiB, shm_free=64 * MiB)),
        "advice",
        "/dev/shm has 64 MiB",
    ),
    "full /dev/shm": (environment(host=HostFacts(shm_total=8 * GiB, shm_free=MiB)), "advice", "/dev/shm is nearly full"),
    "few files": (
        environment(limits=ProcessLimits(open_files=1024, open_files_most=4096)),
        "advice",
        "this process may open only 1024 files",
    ),
    "locked memory": (
        environment(limits=ProcessLimits(open_files=65536, locked_memory=8 * MiB), has_infiniband=True),
        "advice",
        "this process may lock 8 MiB",
    ),
    "few processes": (environment(limits=ProcessLimits(processes=100)), "advice", "only 100 processes and threads"),
    "address space": (environment(host=HostFacts(address_limit=16 * GiB)), "advice", "the address space is limited"),
    "full container": (
        environment(host=HostFacts(group_limit=16 * GiB, group_room=GiB)),
        "advice",
        "the container is nearly full: 1 GiB left of 16 GiB",
    ),
    "threads": (environment(torch_threads=64), "advice", "PyTorch computes with 64 threads on 8 cores"),
    "old toolkit": (
        environment(toolkit=toolkit((11, 8))),
        "note",
        "nvcc is of CUDA 11.8 and this PyTorch is built for 13.0",
    ),
    "toolkit without nvcc": (environment(toolkit=toolkit(None, has_nvcc=False)), "note", "has no bin/nvcc"),
    "toolkit without headers": (environment(toolkit=toolkit((13, 0), has_headers=False)), "note", "has no cuda_runtime.h"),
    "toolkit newer than the driver": (
        environment(toolkit=toolkit((13, 2))),
        "note",
        "nvcc is newer than the driver's CUDA 13.0",
    ),
    "no compiler": (environment(toolkit=replace(toolkit((13, 0)), compiler=None)), "note", "there is no C++ compiler"),
    "new compiler": (environment(toolkit=toolkit((13, 0), newest_gcc=11)), "note", "nvcc takes GCC up to 11"),
    "NCCL without a file": (environment(variables=(("NCCL_DEBUG", "INFO"),)), "note", "NCCL logs to the standard output"),
    "contradiction": (
        environment(
            variables=(("PYTORCH_ALLOC_CONF", "backend:native"), ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"))
        ),
        "problem",
        "PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF say different things",
    ),
    "old name": (
        environment(variables=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)),
        "note",
        "PYTORCH_CUDA_ALLOC_CONF is the old name of PYTORCH_ALLOC_CONF",
    ),
    "unknown key": (
        environment(variables=(("PYTORCH_ALLOC_CONF", "max_split_size:128"),)),
        "problem",
        "PYTORCH_ALLOC_CONF cannot be used as it is",
    ),
    "trap": (
        environment(variables=(("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128"),)),
        "advice",
        "which work against each other",
    ),
    "ROCm's name": (
        environment(variables=(("PYTORCH_HIP_ALLOC_CONF", "backend:native"),)),
        "note",
        "read by ROCm's builds only",
    ),
    "renamed": (
        environment(variables=(("NCCL_ASYNC_ERROR_HANDLING", "1"),)),
        "advice",
        "NCCL_ASYNC_ERROR_HANDLING is an obsolete name; PyTorch reads TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ),
    "blocking": (environment(variables=(("CUDA_LAUNCH_BLOCKING", "1"),)), "advice", "CUDA_LAUNCH_BLOCKING=1 is a switch"),
    "two OpenMP runtimes": (
        environment(openmp=("/a/libiomp5.so", "/b/libomp-1a2b.so.5"), variables=(("KMP_DUPLICATE_LIB_OK", "True"),)),
        "advice",
        "two OpenMP runtimes are loaded, and KMP_DUPLICATE_LIB_OK lets them be",
    ),
    "detail": (environment(variables=(("TORCH_DISTRIBUTED_DEBUG", "DETAIL"),)), "advice", "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    "Apex": (environment(modules=frozenset({"apex", "apex.amp"})), "advice", "NVIDIA Apex's `amp` is imported"),
}

LEARNER_FAULTS: dict[str, tuple[LearnerFacts, str, str]] = {
    "workers": (
        LearnerFacts(loaders=(LoaderSettings(name="the training loader", workers=16),)),
        "advice",
        "the training loader has 16 workers on 8 cores",
    ),
    "batches in /dev/shm": (
        LearnerFacts(loaders=(LoaderSettings(name="the training loader", workers=8, batch=2 * GiB),)),
        "problem",
        "the training loader can want 48 GiB of /dev/shm",
    ),
    "not pinned": (
        replace(_LEARNER, loaders=(LoaderSettings(name="the training loader", workers=4),)),
        "note",
        "does not pin its memory",
    ),
    "static scale": (
        replace(_LEARNER, precision=PrecisionFacts(scaler="GradScaler", is_scaling=True, growth_interval=2**31)),
        "advice",
        "the loss scale is static",
    ),
    "eps that is just lost": (
        replace(_LEARNER, precision=PrecisionFacts(half_parameters=4, eps=(2.0**-25,))),
        "problem",
        "eps=2.98023e-08 of the optimizer",
    ),
    "eps": (
        replace(_LEARNER, precision=PrecisionFacts(half_parameters=4, eps=(1e-8,))),
        "problem",
        "eps=1e-08 of the optimizer",
    ),
    "half": (
        replace(_LEARNER, precision=PrecisionFacts(half_parameters=4, eps=(1e-5,))),
        "advice",
        "parameters themselves are",
    ),
}


def test_a_healthy_environment_raises_nothing() -> None:
    assert findings(HEALTHY, _LEARNER) == []
    assert {check.state for check in checks(HEALTHY, _LEARNER)} == {"ok"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_the_only_thing_that_stands_out(fault: str) -> None:
    facts, severity, what = FAULTS[fault]

    (finding,) = findings(facts, _LEARNER)
    assert what in finding.what
    assert finding.severity == severity
    assert finding.evidence
    assert finding.command


@pytest.mark.parametrize("fault", LEARNER_FAULTS)
def test_a_fault_of_a_learner_is_the_only_thing_that_stands_out(fault: str) -> None:
    learner, severity, what = LEARNER_FAULTS[fault]

    (finding,) = findings(HEALTHY, learner)
    assert what in finding.what
    assert (finding.severity, bool(finding.evidence and finding.command)) == (severity, True)


def test_what_could_not_be_looked_at_is_not_in_order() -> None:
    missing = {check.name: check for check in checks(replace(HEALTHY, torch=None, driver=DriverFacts(reason="no driver")))}

    assert missing["driver and CUDA"].state == "not checked"
    assert "import torch" in missing["driver and CUDA"].evidence
    assert missing["loaders"].evidence == "no Learner was given: `%nbguard doctor learn`"


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ("sm_90",), True),
        ((8, 9), ("sm_86",), True),  # the same major version, an older minor one
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_86", "compute_86"), True),  # portable code of an older one
        ((9, 1), ("sm_90a",), False),  # of this one alone
        ((9, 0), ("sm_90a",), True),
        ((6, 0), ("sm_75", "compute_120"), False),
        ((12, 0), ("sm_120",), True),
    ],
)
def test_code_for_a_gpu(capability: tuple[int, int], architectures: tuple[str, ...], runs: bool) -> None:
    assert runs_on(capability, architectures) is runs


@pytest.mark.parametrize("text", ["max_split_sz_mb:128", "expandable_segments:Tru", "max_split_size_mb:1", "nonsense", ""])
def test_settings_that_pytorch_refuses_are_no_advice(text: str) -> None:
    """Seen: the note about the old name of the variable advised the settings that had just been refused."""
    found = findings(environment(variables=(("PYTORCH_CUDA_ALLOC_CONF", text),)))

    assert found
    for finding in found:
        for setting in re.findall(r'ALLOC_CONF="([^"]*)"', finding.command):
            AllocatorSettings.parse(setting, (2, 13))


def test_the_compilers_of_windows_are_not_judged() -> None:
    """`nvcc.exe` is no `bin/nvcc`, and nothing here finds what Visual Studio has installed."""
    facts = environment(toolkit=toolkit(None, has_nvcc=False))

    (here,) = toolkit_checks(facts)
    (there,) = toolkit_checks(replace(facts, system="Windows 11 AMD64"))

    assert here.findings
    assert (there.state, there.findings) == ("not checked", ())
