"""Checks before ranks are launched: pure, over the variables of every launcher; and read from this process."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import nbguard
from nbguard.memory.core.oom_facts import HostFacts
from nbguard.training.doctor.analysis.diagnosis import Check, DriverFacts
from nbguard.training.doctor.analysis.launch_checks import LaunchFacts, SelfTest, launch_checks, pod_checks
from nbguard.training.doctor.launch import launch_facts
from nbguard.training.ranks.analysis.flight_dump import PortOwner
from nbguard.training.ranks.analysis.launch_errors import launch_of
from nbguard.units import GiB, MiB
from tests.doctor.environments import HEALTHY
from tests.thorough import THOROUGH

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def checks(tried: SelfTest | None = None, *, variables: dict[str, str] | None = None, **facts: Any) -> dict[str, Check]:
    interfaces = (("eth0", True), ("ib0", False))
    listener = PortOwner(7, "torchrun", is_job=True) if "RANK" in (variables or {}) else None
    here = {"addresses": ("10.0.0.1",), "is_here": True, "listener": listener}
    given = {"pid": 1, "port": 29500, "interfaces": interfaces, **here, **facts}
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
        ({**POD, "PET_NNODES": "2", "PET_NODE_RANK": "1"}, "Kubernetes, rank 1 of 2"),
        ({**POD, "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4"}, "Kubernetes"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "mpirun, rank 1 of 4"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, "srun, rank 1 of 4"),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "mpirun, rank 3 of 4"),
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
        ("launcher", "thinks it is the only one", {"variables": {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}}),
        ("launcher", "MASTER_ADDR, MASTER_PORT is not set", {"variables": {"RANK": "0", "WORLD_SIZE": "2"}}),
        ("launcher", "RANK=4 is not a rank of a job of 4", {"variables": {**TORCHRUN, "RANK": "4"}}),
        ("launcher", "4 processes run the same command, but this one thinks it is the only one", {"siblings": 3}),
        (
            "launcher",
            "the process group has 2 ranks, WORLD_SIZE says 4",
            {"variables": TORCHRUN, "group_world": 2},
        ),
        ("launcher", "torchrun did not launch this process", {"variables": {**POD, "PET_NNODES": "2", "PET_NODE_RANK": "1"}}),
        ("launcher", "thinks it is the only one", {"variables": {"PMI_RANK": "3", "PMI_SIZE": "8"}}),
        ("launcher", "torchrun replaces it", {"variables": TORCHRUN, "legacy": ("--nproc_per_node=4", "train.py")}),
        ("launcher", "an Accelerator was made in this process", {"has_accelerator": True}),
        ("port", "port 29500 is in use", {"listener": PortOwner(7, "python train.py")}),
        ("address", "does not resolve", {"variables": TORCHRUN, "addresses": ()}),
        (
            "address",
            "means each host itself",
            {"variables": {**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, "addresses": ("127.0.0.1", "::1")},
        ),
        ("interfaces", "names ib0, which is down", {"variables": {"NCCL_SOCKET_IFNAME": "ib0"}}),
        ("interfaces", "names wlan, which is not an interface", {"variables": {"GLOO_SOCKET_IFNAME": "wlan"}}),
        ("self-test", "cannot exchange data", {"tried": SelfTest(seconds=1.0, error="RuntimeError: no route")}),
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
    assert checks(variables=TORCHRUN, listener=PortOwner(7, "python", is_job=True))["port"].state == "ok"


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ({"variables": TORCHRUN, "listener": None}, "advice"),  # rank 1, and nobody listens
        ({"variables": {**TORCHRUN, "RANK": "0"}, "listener": None}, "ok"),  # it opens the port itself
        ({"variables": {**TORCHRUN, "RANK": "0"}, "has_agent": True, "listener": None}, "advice"),
        ({"variables": TORCHRUN, "listener": None, "has_group": True, "group_world": 4, "group_rank": 1}, "ok"),
        ({"variables": TORCHRUN, "listener": PortOwner(7, "nc -l", is_job=False)}, "problem"),
        ({"variables": {**TORCHRUN, "RANK": "0"}, "listener": PortOwner(7, "nc -l", is_job=False)}, "problem"),
        ({"variables": TORCHRUN, "listener": PortOwner(None, "")}, "not checked"),
        ({"variables": TORCHRUN, "is_here": False}, "not checked"),
    ],
)
def test_a_port_is_in_order_where_the_job_meets_there(facts: dict[str, Any], state: str) -> None:
    assert checks(**facts)["port"].state == state


def test_an_address_of_another_host_is_not_in_order_unless_it_was_tried() -> None:
    assert checks(variables=TORCHRUN, is_here=False)["address"].state == "not checked"


@pytest.mark.parametrize(
    ("rank", "world", "others"),
    [
        ("SLURM_PROCID", "SLURM_NTASKS", {}),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", {}),
        ("PMI_RANK", "PMI_SIZE", {}),
        ("ROLE_RANK", "ROLE_WORLD_SIZE", {"TORCHELASTIC_RUN_ID": "x", "ROLE_NAME": "default"}),
        ("PET_NODE_RANK", "PET_NNODES", POD),
    ],
)
def test_numbers_that_contradict_the_launchers_are_told(rank: str, world: str, others: dict[str, str]) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1", **others}

    for given in ({rank: "1", world: "4"}, {rank: "0", world: "4"}, {rank: "1"}):
        variables = {**place, **given}
        (finding,) = checks(variables=variables)["launcher"].findings
        assert f"{rank}={given[rank]}" in finding.evidence
        after = environment_after(finding.command, variables)
        assert checks(variables=after)["launcher"].findings == ()
    assert checks(variables={**place, rank: "0", world: "2"})["launcher"].findings == ()


def environment_after(command: str, variables: dict[str, str]) -> dict[str, str]:
    """Return the variables of a process after a command."""
    program = f"import os, json\n{command}\nprint(json.dumps(dict(os.environ)))"
    run = subprocess.run([sys.executable, "-S", "-c", program], env=variables, capture_output=True, check=True)
    after = json.loads(run.stdout)
    return {name: value for name, value in after.items() if name in (*variables, "RANK", "WORLD_SIZE")}


@pytest.mark.parametrize(
    ("variables", "world"),
    [
        ({"ROLE_NAME": "actor", "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "1", **TORCHRUN}, "4"),  # one of several roles
        ({**POD, "PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "RANK": "6"}, "8"),
        ({**TORCHRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "4"),  # below srun, which numbers the hosts
    ],
)
def test_numbers_of_hosts_and_roles_are_no_contradiction(variables: dict[str, str], world: str) -> None:
    place = {"MASTER_ADDR": "h", "MASTER_PORT": "1"}

    assert checks(variables={**place, **variables, "WORLD_SIZE": world})["launcher"].findings == ()


def test_the_legacy_launcher_is_told_from_torchrun_and_its_line_launches(tmp_path: Path) -> None:
    run = pytest.importorskip("torch.distributed.run")
    script = tmp_path / "old.py"
    script.write_text(
        "import json, os, sys\nimport nbguard\n"
        "(check,) = [each for each in nbguard.diagnose_launch().checks if each.name == 'launcher']\n"
        "print(json.dumps([check.evidence, [each.command for each in check.findings], os.environ['LOCAL_RANK'], sys.argv[1:]]))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(nbguard.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
    }

    def launched(command: list[str]) -> Any:
        process = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert process.returncode == 0, process.stderr[-2000:]
        return json.loads(process.stdout.splitlines()[-1])

    given = ["--nproc_per_node=1", "--master_port=0", "old.py", "--lr", "1e-3"]
    legacy = [sys.executable, "-W", "ignore", "-m", "torch.distributed.launch"]
    evidence, (command,), _, arguments = launched([*legacy, *given])
    assert evidence == "torch.distributed.launch, rank 0 of 1"
    assert arguments == ["--local-rank=0", "--lr", "1e-3"]

    program, *line = shlex.split(command, comments=True)
    assert program == "torchrun"
    taken = run.parse_args(line)
    assert (taken.nproc_per_node, taken.training_script, taken.training_script_args) == ("1", "old.py", ["--lr", "1e-3"])
    if not THOROUGH:
        return
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    assert launched([*torchrun, *line]) == ["torchrun, rank 0 of 1", [], "0", ["--lr", "1e-3"]]


def test_a_pod_is_named_with_its_limits_and_devices() -> None:
    host = HostFacts(shm_total=64 * MiB, shm_free=64 * MiB, group_limit=16 * GiB, group_room=8 * GiB)
    for visible, variables, findings in (
        ("void", {}, 1),
        ("all", {}, 0),
        ("GPU-1", {"RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 1),
    ):
        facts = LaunchFacts(variables=tuple({**POD, "NVIDIA_VISIBLE_DEVICES": visible, **variables}.items()), pid=1, port=29500)
        driver = HEALTHY.driver if visible == "GPU-1" else DriverFacts()
        (check,) = pod_checks(facts, replace(HEALTHY, host=host, driver=driver))
        for part in ("16 GiB of memory", "8 cores", "64 MiB of shared memory", f"NVIDIA_VISIBLE_DEVICES={visible}"):
            assert part in check.evidence
        assert len(check.findings) == findings
    assert pod_checks(LaunchFacts(variables=(), pid=1, port=29500), HEALTHY) == ()


def test_a_foreign_process_at_the_port_is_told_from_a_rank() -> None:
    listens = "import socket, sys; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); print('up', flush=True)"
    for is_rank in (False, True):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", *place)}
        program = [sys.executable, "-c", f"{listens}; sys.stdin.read()", port]
        env = {**kept, **place, "RANK": "0"} if is_rank else kept
        with subprocess.Popen(program, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "up\n"
            facts = launch_facts({**place, "RANK": "1"})
            assert facts.listener is not None
            assert (facts.listener.pid, facts.listener.is_job) == (other.pid, is_rank)
            other.communicate("")


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


@pytest.mark.slow
def test_two_processes_add_a_tensor_together(torch_process: None) -> None:
    (check,) = (check for check in nbguard.diagnose_launch(self_test=True).checks if check.name == "self-test")

    assert check.state == "ok", check.evidence
