"""The environment as it is read: from planted /proc and variables, and of this process, without importing anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import nbguard
from nbguard.training.doctor.environment import environment_facts

_PROGRAM = """
import sys, time
import nbguard.training.doctor.diagnose
before = set(sys.modules)
start = time.perf_counter()
diagnosis = nbguard.diagnose()
print(time.perf_counter() - start)
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} & {"torch", "fastai", "numpy", "IPython"}))
"""


def test_tier_0_imports_nothing_and_is_quick() -> None:
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    seconds, imported = run.stdout.splitlines()

    assert imported == "[]"
    assert float(seconds) < 0.3


def test_only_variables_that_matter_are_read(tmp_path: Path) -> None:
    facts = environment_facts(tmp_path, {"NCCL_DEBUG": "INFO", "AWS_SECRET_ACCESS_KEY": "x", "HOME": "/root"})

    assert facts.variables == (("NCCL_DEBUG", "INFO"),)


def test_a_planted_machine_is_read(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun\n")
    (tmp_path / "proc/self/fd").mkdir(parents=True)
    (tmp_path / "proc/self/fd/7").symlink_to("/dev/nvidia-uvm")
    (tmp_path / "proc/self/maps").write_text(
        "7f00-7f01 r-xp 0 00:00 1   /usr/lib/libcudnn.so.9\n7f02-7f03 r-xp 0 00:00 1 /lib/libc.so\n"
    )
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/pids.max").write_text("99\n")

    facts = environment_facts(tmp_path, {})
    assert facts.has_driver_open
    assert facts.has_infiniband
    assert facts.libraries == (("libcudnn", "/usr/lib/libcudnn.so.9"),)
    assert facts.limits.processes == 99
    assert facts.driver.gpus or facts.driver.version == "580.65.06"


def test_a_variable_that_scikit_learn_sets_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("torch")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")

    assert not [finding for finding in nbguard.diagnose().findings if "KMP_" in finding.what]


def test_openmp_runtimes_that_are_loaded_are_seen(tmp_path: Path) -> None:
    maps = tmp_path / "proc/self/maps"
    maps.parent.mkdir(parents=True)
    names = ("libiomp5.so", "libomp-a34b3233.so.5.0", "libgomp-24e2ab19.so.1.0.0", "libc.so.6")
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 00:00 1   /opt/{name}\n" for name in names))

    assert environment_facts(tmp_path).openmp == ("/opt/libiomp5.so", "/opt/libomp-a34b3233.so.5.0")


def test_this_process(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    facts = environment_facts()
    assert facts.torch is not None
    assert facts.torch.version == torch.__version__
    assert facts.torch.cuda == (torch.version.cuda or "")
    assert facts.torch.threads == torch.get_num_threads()
    assert not torch.cuda.is_initialized()


def test_advice_for_this_process_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of Python that tier 0 prints about this process runs, and the finding is gone afterwards."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "1")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    torch.set_num_threads(64)
    try:
        found = [finding for finding in nbguard.diagnose().findings if finding.severity == "advice"]
        words = ("torch.set_num_threads", "NCCL_BLOCKING_WAIT", "CUDA_LAUNCH_BLOCKING")
        mine = [finding for finding in found if any(word in finding.command for word in words)]
        assert len(mine) == 3
        for finding in mine:
            exec(finding.command, {"torch": torch})
        left = {finding.what for finding in nbguard.diagnose().findings}
        assert left.isdisjoint(finding.what for finding in mine)
    finally:
        monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("wrong", [3, "learn", [1]])
def test_what_is_no_model_is_one_clear_line(wrong: object) -> None:
    pytest.importorskip("torch")
    with pytest.raises(nbguard.NbguardError, match=f"this {type(wrong).__name__} is neither a Learner nor a model"):
        nbguard.diagnose(wrong)
