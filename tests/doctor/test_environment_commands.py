"""The commands of the environment's findings, executed: each fault is gone afterwards."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from nbguard.training.doctor.analysis.diagnosis import PREFIXES, EnvironmentFacts
from nbguard.training.doctor.diagnose import learner_facts
from nbguard.training.doctor.environment import environment_facts
from nbguard.training.doctor.subject import subject_of
from tests.doctor import learners
from tests.doctor.environments import HEALTHY, findings
from tests.doctor.test_environment_checks import FAULTS, LEARNER_FAULTS

_NEEDS_DOCKER = ("docker run --shm-size=", "docker run --ulimit memlock=", "docker run --pids-limit=")
_ELSEWHERE = "%reset_gpu --workers"
"""Run in kernels with real workers: tests/kernel/test_workers.py."""


def command_of(fault: str) -> str:
    (finding,) = findings(*_diagnosed(fault))
    return finding.command


def _diagnosed(fault: str) -> tuple[EnvironmentFacts, Any]:
    if fault in FAULTS:
        return FAULTS[fault][0], None
    return HEALTHY, LEARNER_FAULTS[fault][0]


# Two runtimes of OpenMP are a matter of what is installed: the advice is no command.
VARIABLES = [fault for fault, (facts, _, _) in FAULTS.items() if facts.variables and not facts.openmp]


@contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    """Have these variables in the environment, and of those that are watched no others."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith(PREFIXES)]:
        del os.environ[name]
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def in_a_shell(command: str, values: dict[str, str]) -> dict[str, str]:
    """Return the environment of what is started by a shell after a command."""
    program = [sys.executable, "-c", "import os, json; print(json.dumps(dict(os.environ)))"]
    script = f'{command}\nexec "$@"'
    run = subprocess.run(
        ["bash", "-c", script, "bash", *program], env={**values, "PATH": os.environ["PATH"]}, capture_output=True, check=True
    )
    left: dict[str, str] = json.loads(run.stdout)
    return left


@pytest.mark.parametrize("fault", VARIABLES)
def test_a_variable_is_in_order_after_the_command(fault: str) -> None:
    facts, command = FAULTS[fault][0], command_of(fault)
    if command.startswith(("export ", "unset ")):
        after = in_a_shell(command, dict(facts.variables))
    else:
        with variables(dict(facts.variables)):
            exec(command, {})
            after = dict(os.environ)

    left = tuple(sorted((name, value) for name, value in after.items() if name.startswith(PREFIXES)))
    assert left != facts.variables
    assert findings(replace(facts, variables=left)) == []


@pytest.mark.parametrize("fault", ["other cuDNN", "the system's cuDNN"])
def test_the_wheels_own_cudnn_is_found_first_after_the_command(fault: str) -> None:
    assert "LD_LIBRARY_PATH" not in in_a_shell(command_of(fault), {"LD_LIBRARY_PATH": "/usr/lib"})


def test_threads_and_precision_are_set() -> None:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        for fault in ("threads", "no TF32"):
            exec(command_of(fault), {"torch": torch})
        facts = environment_facts().torch
        assert facts is not None
        assert (facts.threads, facts.matmul_precision) == (8, "high")
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


def test_the_limit_of_open_files_is_raised() -> None:
    command = command_of("few files")
    program = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))\n{command}\n"
    program += "from nbguard.training.doctor.environment import environment_facts; print(environment_facts().limits.open_files)"

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(run.stdout) == 4096


def test_no_limit_of_the_address_space_is_left() -> None:
    script = f"{command_of('address space')}\nulimit -v"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "unlimited"


@pytest.mark.parametrize("fault", ["half", "eps", "Apex"])
def test_a_learner_is_in_order_after_the_command(fault: str) -> None:
    import fastai.callback.fp16  # noqa: F401 - a fastai notebook has it: it gives Learners their to_fp16

    learn = learners.make("tabular")[0]
    if fault != "Apex":
        learn.model.half()

    exec(command_of(fault), {"learn": learn})
    facts = learner_facts(subject_of(learn))
    assert facts.precision is not None
    assert facts.precision.half_parameters == 0
    assert any(type(callback).__name__ == "MixedPrecision" for callback in learn.cbs)


def test_the_scaler_that_is_advised_is_not_static() -> None:
    call = ast.parse(command_of("static scale"), mode="eval").body
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.func) == "torch.amp.GradScaler"
    assert inspect.signature(torch.amp.GradScaler).parameters["growth_interval"].default == 2000


def test_every_other_command_says_what_to_do_outside_of_the_kernel() -> None:
    executed = {*VARIABLES, "other cuDNN", "the system's cuDNN", "threads", "no TF32", "few files", "address space"}
    executed |= {"half", "eps", "eps that is just lost", "Apex", "static scale"}
    for fault in (*FAULTS, *LEARNER_FAULTS):
        if fault not in executed and not command_of(fault).startswith("export TORCH_CUDA_ARCH_LIST="):
            assert command_of(fault).startswith(("# ", *_NEEDS_DOCKER)) or command_of(fault) == _ELSEWHERE
