"""Checks before ranks are launched: pure, over the variables of every launcher; and read from this process."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

import nbguard
from nbguard.doctor.analysis.diagnosis import Check
from nbguard.doctor.analysis.launch.checks import launch_checks
from nbguard.doctor.analysis.launch.facts import LaunchFacts, PortOwner, SelfTest
from nbguard.doctor.launch import launch_facts
from nbguard.ranks.analysis.launcher import launch_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}


def checks(tried: SelfTest | None = None, *, variables: dict[str, str] | None = None, **facts: Any) -> dict[str, Check]:
    given = {"pid": 1, "port": 29500, "interfaces": (("eth0", True), ("ib0", False)), "addresses": ("10.0.0.1",), **facts}
    made = launch_checks(LaunchFacts(variables=tuple((variables or {}).items()), **given), tried)
    return {check.name: check for check in made}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "no launcher: one process"),
        (TORCHRUN, "torchrun, rank 1 of 4"),
        ({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}, "accelerate, rank 1 of 4"),
        ({"FORK_LAUNCHED": "1", "RANK": "0", "WORLD_SIZE": "2"}, "notebook_launcher, rank 0 of 2"),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, "srun, rank 3 of 8"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "mpirun, rank 0 of 2"),
        ({**TORCHRUN, "SLURM_PROCID": "0"}, "torchrun, rank 1 of 4"),
        ({"RANK": "1", "WORLD_SIZE": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes, rank 1 of 2"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "no launcher: one process"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "no launcher: one process"),
    ],
)
def test_the_launcher_is_named(variables: dict[str, str], words: str) -> None:
    assert launch_of(variables).words == words


def test_a_good_launch_has_no_findings() -> None:
    made = checks(SelfTest(seconds=3.0), variables=TORCHRUN)

    assert {check.state for check in made.values()} == {"ok"}


@pytest.mark.parametrize(
    ("check", "says", "facts"),
    [
        ("launcher", "each of 8 processes believes to be alone", {"variables": {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}}),
        ("launcher", "MASTER_ADDR, MASTER_PORT is not set", {"variables": {"RANK": "0", "WORLD_SIZE": "2"}}),
        ("launcher", "RANK=4 is not a rank of a job of 4", {"variables": {**TORCHRUN, "RANK": "4"}}),
        ("launcher", "4 processes run the same command, and this one believes to be alone", {"siblings": 3}),
        (
            "launcher",
            "the process group has 2 ranks, WORLD_SIZE says 4",
            {"variables": TORCHRUN, "group_world": 2},
        ),
        ("launcher", "an Accelerator was made in this process", {"has_accelerator": True}),
        ("port", "port 29500 is in use", {"listener": PortOwner(7, "python train.py")}),
        ("address", "stands for no address", {"variables": TORCHRUN, "addresses": ()}),
        (
            "address",
            "means each host itself",
            {"variables": {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, "addresses": ("127.0.0.1", "::1")},
        ),
        ("interfaces", "names ib0, which is down", {"variables": {"NCCL_SOCKET_IFNAME": "ib0"}}),
        ("interfaces", "names wlan, which is not an interface", {"variables": {"GLOO_SOCKET_IFNAME": "wlan"}}),
        ("self-test", "cannot work together", {"tried": SelfTest(seconds=1.0, error="RuntimeError: no route")}),
    ],
)
def test_a_bad_launch_has_a_finding_with_a_command(check: str, says: str, facts: dict[str, Any]) -> None:
    made = checks(facts.pop("tried", None), **facts)

    others = {name for name, each in made.items() if each.findings} - {check}
    assert others == set()
    (finding,) = made[check].findings
    assert says in finding.what
    assert finding.command
    if finding.command.startswith("import "):
        compile(finding.command, "advice", "exec")


def test_a_port_that_the_job_itself_listens_at_is_in_order() -> None:
    assert checks(variables=TORCHRUN, listener=PortOwner(7, "python"))["port"].state == "ok"


def test_the_facts_are_those_of_this_host() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        facts = launch_facts({"MASTER_PORT": str(taken.getsockname()[1]), "MASTER_ADDR": "127.0.0.1", "HOME": "/"})

    assert facts.listener is not None
    assert facts.listener.pid == os.getpid()
    assert facts.addresses == ("127.0.0.1",)
    assert dict(facts.interfaces)["lo"]
    assert "HOME" not in facts.variable


def test_the_diagnosis_holds_the_environment_too() -> None:
    names = {check.name for check in nbguard.diagnose_launch().checks}

    assert {"launcher", "port", "address", "interfaces", "self-test", "/dev/shm", "limits", "start of CUDA"} <= names


def test_two_processes_add_a_tensor_together(torch_process: None) -> None:
    (check,) = (check for check in nbguard.diagnose_launch(self_test=True).checks if check.name == "self-test")

    assert check.state == "ok", check.evidence
