"""Checks before ranks are launched, and in one of them, on launcher, port, address, interfaces and pod, with their facts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from ipaddress import ip_address

from nbguard.memory.core.advice import SELF_TEST
from nbguard.training.doctor.analysis.diagnosis import Check, CheckFinding, EnvironmentFacts, checked, not_checked
from nbguard.training.ranks.analysis.flight_dump import PortOwner
from nbguard.training.ranks.analysis.launch_errors import POD, launch_of, number, own_names
from nbguard.units import counted, format_bytes

# --- Facts of a launch: the launchers' variables, the listener at the port, the interfaces. Plain data.


PREFIXES = (
    "ACCELERATE_", "CUDA_VISIBLE_DEVICES", "FORK_LAUNCHED", "GLOO_", "GROUP_", "KUBERNETES_SERVICE_", "LOCAL_", "MASTER_",
    "NCCL_", "NODE_", "NVIDIA_VISIBLE_DEVICES", "OMPI_COMM_", "PET_", "PMI_", "RANK", "ROLE_", "SLURM_",
    "TORCHELASTIC_", "WORLD_SIZE",
)  # fmt: skip
"""Beginnings of the names of variables that launchers set or read."""

LEGACY = "torch.distributed.launch"
"""The module that torchrun has replaced; it, too, sets all of torchrun's variables."""


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """Facts of a launch that can be read without taking part in it."""

    variables: tuple[tuple[str, str], ...]  # set ones whose names begin with PREFIXES
    pid: int
    port: int  # that would be used: MASTER_PORT, or the default
    listener: PortOwner | None = None  # at that port of this host; None without one
    addresses: tuple[str, ...] = ()  # that MASTER_ADDR stands for; empty if it is not set, or stands for none
    is_here: bool = False  # whether one of them is this host's
    has_agent: bool = False  # whether the launcher listens for the job, and no rank does
    interfaces: tuple[tuple[str, bool], ...] = ()  # name, and whether it is up
    has_group: bool = False  # whether torch.distributed is initialised in this process
    group_rank: int | None = None  # in it
    group_world: int | None = None
    has_accelerator: bool = False  # whether accelerate's state is made in this process: an Accelerator was
    legacy: tuple[str, ...] = ()  # arguments of the LEGACY launcher above this process; empty without one
    siblings: int = 0  # other processes of this user and parent with the same command

    @cached_property
    def variable(self) -> dict[str, str]:
        """Return the variables by name."""
        return dict(self.variables)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """The outcome of two processes of this host that add a tensor together."""

    seconds: float
    error: str = ""  # empty if both have the sum


_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_USE_ENV = ("--use-env", "--use_env")
_ASK = "not requested: " + SELF_TEST.code + f" {SELF_TEST.effect}"


def launch_checks(facts: LaunchFacts, tried: SelfTest | None) -> tuple[Check, ...]:
    """Return the checks of a launch; `tried` is the outcome of the self-test, if it was asked for."""
    return (_launcher(facts), _port(facts), _address(facts), _interfaces(facts), _self_test(tried))


def _launcher(facts: LaunchFacts) -> Check:
    launch = launch_of(facts.variable)
    group = "" if facts.group_rank is None else f"; its process group: rank {facts.group_rank} of {facts.group_world}"
    if facts.legacy:
        launch = replace(launch, launcher=LEGACY)
    return checked("ranks", "launcher", f"{launch.words}{group}", *_launcher_findings(facts))


def _launcher_findings(facts: LaunchFacts) -> Iterator[CheckFinding]:
    variables, launch = facts.variable, launch_of(facts.variable)
    rank, world = number(variables.get("RANK")), number(variables.get("WORLD_SIZE"))
    yield from _legacy(facts)
    names = own_names(launch.launcher, variables)
    if launch.launcher == "Kubernetes" and rank is None:
        yield CheckFinding(
            severity="problem",
            what="the job's operator set torchrun's options for this pod, but torchrun did not launch this process",
            evidence=", ".join(f"{name}={value}" for name, value in facts.variables if name.startswith("PET_N")),
            command="torchrun train.py   # in the pod; reads PET_NNODES, PET_NODE_RANK and the others by itself",
        )
    elif names and launch.launcher != "torchrun" and (launch.world or 1) > 1 and "RANK" not in variables:
        yield CheckFinding(
            severity="problem",
            what=(
                f"each of the {launch.world} processes thinks it is the only one, because PyTorch reads RANK "
                f"and {launch.launcher} does not set it"
            ),
            evidence=f"{names[0]}={variables.get(names[0])}, and RANK is not set",
            command=f'import os; os.environ.update(RANK=os.environ["{names[0]}"], WORLD_SIZE=os.environ["{names[1]}"])',
        )
    yield from _contradiction(facts, launch.launcher)
    set_ones = [name for name in _PLACE if name in variables]
    if 0 < len(set_ones) < len(_PLACE) and "RANK" in variables:
        missing = ", ".join(name for name in _PLACE if name not in variables)
        yield CheckFinding(
            severity="problem",
            what=f"{missing} is not set although RANK is, so `init_process_group` will fail",
            evidence=f"{', '.join(set_ones)} of {', '.join(_PLACE)} are set",
            command="torchrun --standalone --nproc-per-node=2 train.py   # sets all four",
        )
    if rank is not None and world is not None and rank >= world:
        yield CheckFinding(
            severity="problem",
            what=f"RANK={rank} is not a rank of a job of {world}",
            evidence=f"RANK={rank}, WORLD_SIZE={world}; ranks count from 0",
            command='import os; del os.environ["RANK"], os.environ["WORLD_SIZE"]   # then launch again',
        )
    if rank is None and facts.siblings and not facts.has_group:
        yield CheckFinding(
            severity="advice",
            what=f"{facts.siblings + 1} processes run the same command, but this one thinks it is the only one",
            evidence="no RANK is set, and no process group was made",
            command="torchrun --standalone --nproc-per-node=2 train.py   # numbers them",
        )
    if facts.has_accelerator and rank is None:
        yield CheckFinding(
            severity="advice",
            what="an Accelerator was made in this process, so `notebook_launcher` refuses to launch from it",
            evidence="accelerate's state already exists; make the Accelerator inside the launched function",
            command="from accelerate.state import AcceleratorState; AcceleratorState._reset_state(True)   # or restart",
        )
    if facts.group_world is not None and world is not None and world != facts.group_world:
        yield CheckFinding(
            severity="problem",
            what=f"the process group has {facts.group_world} ranks, WORLD_SIZE says {world}",
            evidence=f"rank {facts.group_rank} of {facts.group_world} in the group",
            command="import torch; torch.distributed.destroy_process_group()   # then make it without rank= and world_size=",
        )


def _legacy(facts: LaunchFacts) -> Iterator[CheckFinding]:
    """Yield that the launcher is the one that torchrun has replaced, with the line of torchrun."""
    if not facts.legacy:
        return
    given = [argument for argument in facts.legacy if argument not in _USE_ENV]
    reads = len(given) < len(facts.legacy)
    yield CheckFinding(
        severity="advice",
        what=f"{LEGACY}, which is deprecated, launched this process: torchrun replaces it",
        evidence="the script reads LOCAL_RANK already, as torchrun's do"
        if reads
        else "it gives the script --local-rank; torchrun sets LOCAL_RANK instead",
        command=shlex.join(["torchrun", *given])
        + ("" if reads else '   # in the script, int(os.environ["LOCAL_RANK"]) takes the place of --local-rank'),
    )


def _contradiction(facts: LaunchFacts, launcher: str) -> Iterator[CheckFinding]:
    """Yield that RANK and WORLD_SIZE say something else than the launcher that has numbered this process."""
    variables, launchers_own = facts.variable, own_names(launcher, facts.variable)
    if launchers_own is None or "RANK" not in variables:
        return
    names = ("RANK", "WORLD_SIZE"), launchers_own
    taken = [f'{ours}=os.environ["{theirs}"]' for ours, theirs in zip(*names, strict=True) if theirs in variables]
    own, launchers = (tuple(number(variables.get(name)) for name in pair) for pair in names)
    if any(one is not None and other is not None and one != other for one, other in zip(own, launchers, strict=True)):
        yield CheckFinding(
            severity="advice",
            what=f"RANK and WORLD_SIZE contradict {launcher}, which gave this process other numbers",
            evidence=", ".join(f"{name}={variables[name]}" for pair in names for name in pair if name in variables),
            command=f"import os; os.environ.update({', '.join(taken)})",
        )


def _port(facts: LaunchFacts) -> Check:
    rank = launch_of(facts.variable).rank
    is_rank = rank is not None or facts.has_group
    if is_rank and not facts.is_here and facts.variable.get("MASTER_ADDR"):
        return not_checked("ranks", "port", f"this host cannot see who listens at {facts.port} of another host")
    listener = facts.listener
    if listener is None:
        return _unheard(facts, number(facts.variable.get("RANK")))
    evidence = f"{listener.words} listens at {facts.port}"
    if is_rank and listener.is_job:
        return checked("ranks", "port", f"{evidence}, the job's own meeting point")
    if is_rank and listener.is_job is None:
        return not_checked("ranks", "port", f"{evidence}; whether it belongs to this job is not known")
    other = facts.port + 1
    finding = CheckFinding(
        severity="problem",
        what=f"port {facts.port} is taken by a process outside the job, so its ranks cannot meet there"
        if is_rank
        else f"port {facts.port} is in use, so a launch on it fails with 'address already in use' or joins another job",
        evidence=evidence,
        command=f'import os; os.environ["MASTER_PORT"] = "{other}"   # on all ranks, before the process group is made'
        if is_rank
        else f'notebook_launcher(train, use_port="{other}")   # in a terminal: torchrun --standalone train.py',
    )
    return checked("ranks", "port", evidence, finding)


def _unheard(facts: LaunchFacts, rank: int | None) -> Check:
    """Return the check of a port at which nobody listens: in order before a launch, and until rank 0 opens it."""
    evidence = f"no process listens at {facts.port} of this host"
    if rank is None or facts.has_group or (rank == 0 and not facts.has_agent):
        return checked("ranks", "port", f"{evidence}{' yet; rank 0 opens it' if rank == 0 and not facts.has_group else ''}")
    who = "its launcher" if facts.has_agent else "rank 0"
    finding = CheckFinding(
        severity="advice",
        what=f"rank {rank} would wait for {who} at port {facts.port}, where no process listens",
        evidence=f"{evidence}; {who} is not that far yet, ended, or has another MASTER_ADDR or MASTER_PORT",
        command="torchrun --standalone --nproc-per-node=2 train.py   # starts all ranks, with one address and port",
    )
    return checked("ranks", "port", evidence, finding)


def _address(facts: LaunchFacts) -> Check:
    host = facts.variable.get("MASTER_ADDR")
    if host is None:
        return checked("ranks", "address", "MASTER_ADDR is not set; launchers use this host")
    if not facts.addresses:
        finding = CheckFinding(
            severity="problem",
            what=f"MASTER_ADDR={host} does not resolve, so ranks cannot connect",
            evidence="this host does not know the name",
            command='import os; os.environ["MASTER_ADDR"] = "127.0.0.1"   # on one host; else an address of rank 0\'s host',
        )
        return checked("ranks", "address", host, finding)
    evidence = f"{host} is {', '.join(facts.addresses)}"
    world, local = (number(facts.variable.get(name)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    is_loopback = all(ip_address(address.partition("%")[0]).is_loopback for address in facts.addresses)
    if is_loopback and world is not None and local is not None and world > local:
        finding = CheckFinding(
            severity="problem",
            what=f"MASTER_ADDR={host} means each host itself, but the job has ranks on several hosts",
            evidence=f"{world} ranks, {local} of them on this host; {evidence}",
            command="torchrun --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 train.py   # HOST: rank 0's",
        )
        return checked("ranks", "address", evidence, finding)
    if not facts.is_here:
        return not_checked("ranks", "address", f"{evidence}, another host; nbguard did not try to reach it")
    return checked("ranks", "address", evidence)


def _interfaces(facts: LaunchFacts) -> Check:
    states = dict(facts.interfaces)
    if not states:
        return not_checked("ranks", "interfaces", "the system does not list its interfaces")
    up = ", ".join(interface for interface, is_up in states.items() if is_up) or "none"
    findings = []
    for name in _INTERFACES:
        wanted = facts.variable.get(name, "").removeprefix("=")
        if not wanted or wanted.startswith("^"):
            continue
        for each in wanted.split(","):
            known = [interface for interface in states if interface.startswith(each)]
            if not known or not any(states[interface] for interface in known):
                findings.append(
                    CheckFinding(
                        severity="problem",
                        what=f"{name} names {each}, which {'is down' if known else 'is not an interface of this host'}",
                        evidence=f"interfaces that are up: {up}",
                        command=f'import os; del os.environ["{name}"]   # before the process group is made',
                    )
                )
    return checked("ranks", "interfaces", f"up: {up}", *findings)


def _self_test(tried: SelfTest | None) -> Check:
    if tried is None:
        return not_checked("ranks", "self-test", _ASK)
    if not tried.error:
        return checked("ranks", "self-test", f"two processes here added up a tensor in {tried.seconds:.1f} s")
    finding = CheckFinding(
        severity="problem",
        what="two processes on this host cannot exchange data",
        evidence=tried.error,
        command='import os; os.environ["GLOO_SOCKET_IFNAME"] = "lo"   # then the self-test again: is it the network?',
    )
    return checked("ranks", "self-test", tried.error, finding)


# --- A pod of Kubernetes as ranks see it, with memory, cores, shared memory, GPUs.


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
