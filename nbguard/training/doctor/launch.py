"""Facts of a launch, read from this process and host; and two processes that try one, if asked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

from nbguard.memory.scan.libraries import has_shared_state
from nbguard.render.markup import clean
from nbguard.texts import printable
from nbguard.training.doctor.analysis.diagnosis import Diagnosis, variable_checks
from nbguard.training.doctor.analysis.gpu_checks import gpu_checks, machine_checks
from nbguard.training.doctor.analysis.launch_checks import LEGACY, PREFIXES, LaunchFacts, SelfTest, launch_checks, pod_checks
from nbguard.training.doctor.environment import environment_facts
from nbguard.training.ranks.analysis.launch_errors import number
from nbguard.training.ranks.meeting_point import addresses_of, has_agent, is_this_host, listener_at

_PORT = 29500
"""The port of torchrun, of other launchers and of `notebook_launcher` if none is given."""
_SELF_TEST = 90  # seconds
_RANK = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
rank, port = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
x = torch.full((4,), float(rank + 1)); dist.all_reduce(x)
assert x.tolist() == [3.0] * 4, f"the sum of 1 and 2 is {x.tolist()}"
dist.barrier(); dist.destroy_process_group()
"""


def launch_facts(variables: Mapping[str, str] = os.environ) -> LaunchFacts:
    """Return the facts of a launch. Nothing is initialised, no connection made; one name is resolved if it is set."""
    port = number(variables.get("MASTER_PORT")) or _PORT
    addresses = addresses_of(variables.get("MASTER_ADDR"))
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    has_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return LaunchFacts(
        variables=tuple(sorted((name, value) for name, value in variables.items() if name.startswith(PREFIXES))),
        pid=os.getpid(),
        port=port,
        listener=listener_at(port, variables),
        addresses=addresses,
        is_here=is_this_host(addresses),
        has_agent=has_agent(variables),
        interfaces=_interfaces(),
        has_group=has_group,
        group_rank=distributed.get_rank() if has_group else None,
        group_world=distributed.get_world_size() if has_group else None,
        has_accelerator=has_shared_state(),
        legacy=_legacy() if "TORCHELASTIC_RUN_ID" in variables else (),
        siblings=_siblings(),
    )


def _interfaces() -> tuple[tuple[str, bool], ...]:
    with suppress(psutil.Error, OSError):
        return tuple((name, state.isup) for name, state in sorted(psutil.net_if_stats().items()))
    return ()


def _legacy() -> tuple[str, ...]:
    """Return the arguments of the legacy launcher among the processes above this one; none where there is none."""
    with suppress(psutil.Error, OSError):
        for parent in psutil.Process().parents()[:3]:
            arguments = parent.cmdline()
            for place, argument in enumerate(arguments[1:], 1):
                if argument == LEGACY or argument.endswith("torch/distributed/launch.py"):
                    return tuple(printable(each) for each in arguments[place + 1 :])
    return ()


def _siblings() -> int:
    """Return how many other processes of the same parent run the same script; notebooks' kernels are none."""
    with suppress(psutil.Error, OSError):
        own = psutil.Process()
        parent, command = own.parent(), own.cmdline()
        if parent is None or "ipykernel" in sys.modules or len(command) < 2:
            return 0
        return sum(_is_alike(other, command) for other in parent.children() if other.pid != own.pid)
    return 0


def _is_alike(process: psutil.Process, command: list[str]) -> bool:
    with suppress(psutil.Error, OSError):
        return bool(process.cmdline() == command)
    return False


def two_processes() -> SelfTest:
    """Have two processes of this host add a tensor together over gloo; seconds, as each imports PyTorch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "RANK", "WORLD_SIZE"))}
    started = time.monotonic()
    ranks = [
        subprocess.Popen(  # noqa: S603 - this Python, with code of ours
            [sys.executable, "-c", _RANK, str(rank), str(port)], env=kept, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    errors = []
    try:
        for rank in ranks:
            _, error = rank.communicate(timeout=max(0.1, _SELF_TEST - (time.monotonic() - started)))
            if rank.returncode:
                lines = [line for line in error.decode(errors="replace").splitlines() if line.strip()]
                errors.append(clean(lines[-1] if lines else f"it ended with status {rank.returncode}", 300))
    except subprocess.TimeoutExpired:
        errors.append(f"they did not end within {_SELF_TEST} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return SelfTest(seconds=time.monotonic() - started, error=errors[0] if errors else "")


# --- `nbguard.diagnose_launch`: can ranks be launched here, and is this process the rank that its launcher meant.


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
