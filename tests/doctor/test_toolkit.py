"""The CUDA toolkit and the compiler of extensions: planted ones, and this machine's; the commands are executed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from nbguard.training.doctor.analysis.diagnosis import ToolkitFacts
from nbguard.training.doctor.analysis.gpu_checks import toolkit_checks
from nbguard.training.doctor.environment import toolkit_facts
from tests.doctor.environments import HEALTHY


def plant(home: Path, version: str, *, gcc: int = 15, is_written: bool = False) -> Path:
    """Make a folder with the parts of a toolkit that are looked at."""
    program(home / "bin/nvcc", f"Cuda compilation tools, release {version}, V{version}.88")
    (home / "include/crt").mkdir(parents=True)
    (home / "include/cuda_runtime.h").write_text("")
    (home / "include/crt/host_config.h").write_text(f"#if defined(__GNUC__)\n#if __GNUC__ > {gcc}\n#error")
    if is_written:
        (home / "version.json").write_text(json.dumps({"cuda": {"version": "1.0"}, "cuda_nvcc": {"version": f"{version}.88"}}))
    return home


def program(file: Path, says: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(0o755)


def findings(root: Path, variables: dict[str, str]) -> list[str]:
    facts = replace(HEALTHY, toolkit=toolkit_facts(root, variables))
    return [finding.command for check in toolkit_checks(facts) for finding in check.findings]


def after(command: str, variables: dict[str, str]) -> dict[str, str]:
    """Return the variables of a shell after a command."""
    bash, env = map(shutil.which, ("bash", "env"))
    assert bash
    assert env
    run = subprocess.run([bash, "-c", f"{command}\n{env} -0"], env=variables, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in run.stdout.split("\0") if line)


def test_the_toolkit_that_pytorch_takes_is_diagnosed_and_the_command_takes_the_right_one(tmp_path: Path) -> None:
    old, right = plant(tmp_path / "old 11.8", "11.8"), plant(tmp_path / "usr/local/cuda-13.0", "13.0", is_written=True)
    plant(tmp_path / "usr/local/cuda-13.1", "13.1")
    program(tmp_path / "bin/c++", "c++ (Debian 12.2.0-14) 12.2.0")
    path = f"{old / 'bin'}:{tmp_path / 'bin'}"
    (tmp_path / "empty").mkdir()

    for given in ({}, {"CUDA_HOME": str(old)}, {"CUDA_PATH": str(old)}, {"CUDA_HOME": str(tmp_path / "empty")}):
        variables = {"PATH": path, **given}
        (command,) = findings(tmp_path, variables)
        left = after(command, variables)
        assert left["CUDA_HOME"] == str(right)
        assert left["PATH"] == f"{right / 'bin'}:{path}"
        assert findings(tmp_path, left) == []
    assert findings(tmp_path, {"PATH": f"{right / 'bin'}:{path}"}) == []


def test_a_compiler_that_nvcc_refuses_is_told_with_one_that_it_takes(tmp_path: Path) -> None:
    home = plant(tmp_path / "usr/local/cuda", "13.0", gcc=11)
    for name, says in (("c++", "c++ (GCC) 12.2.0"), ("g++-12", "g++ 12.2.0"), ("g++-11", "g++-11 (Ubuntu 11.4) 11.4.0")):
        program(tmp_path / "bin" / name, says)
    variables = {"PATH": str(tmp_path / "bin")}

    facts = toolkit_facts(tmp_path, variables)
    assert (facts.toolkits[0].home, facts.toolkits[0].version, facts.numbered) == (str(home), (13, 0), (12, 11))
    (command,) = findings(tmp_path, variables)
    assert findings(tmp_path, after(command, variables)) == []
    program(tmp_path / "bin/c++", "clang version 21.0.1")
    assert findings(tmp_path, variables) == []


def test_what_is_broken_breaks_nothing(tmp_path: Path) -> None:
    assert toolkit_facts(tmp_path, {}) == ToolkitFacts()
    home = plant(tmp_path / "usr/local/cuda", "13.0")
    (home / "bin/nvcc").write_text("no program")
    (home / "version.json").write_text("[1]")
    facts = toolkit_facts(tmp_path, {"CXX": "ccache  no-such-compiler"})
    assert (facts.toolkits[0].version, facts.compiler) == (None, None)


def test_a_real_toolkit_is_read() -> None:
    home = Path("/usr/local/cuda")
    if not (home / "bin/nvcc").is_file():
        pytest.skip("no CUDA toolkit here")
    facts = toolkit_facts(Path("/"), {"CUDA_HOME": str(home), "PATH": os.environ["PATH"]})
    said = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    assert facts.toolkits[0].version is not None
    assert f"release {'.'.join(map(str, facts.toolkits[0].version[:2]))}," in said
    assert facts.toolkits[0].has_headers
    assert facts.toolkits[0].newest_gcc is not None
