"""Processes and the verdict, as text and HTML: every word escaped, figures that add up, and what to do next."""

from __future__ import annotations

import json

from nbguard.memory.cleanup.plan.plan import Action, Outcome, Plan, Request, verdict
from nbguard.memory.core.analysis import Analysis
from nbguard.memory.core.facts import DeviceFacts, ProcessFact
from nbguard.memory.core.gpu_models import GpuReading, Gpus
from nbguard.memory.core.processes import DeviceProcess, DiagnosedProcess, Identity, Process, Zombies
from nbguard.testing import make_facts, make_graph

MIB = 1 << 20
_COMMAND = ("python", "-c", "from multiprocessing.spawn import spawn_main; <script>alert(1)</script>")
_ORPHAN = DiagnosedProcess(
    DeviceProcess(process=Process(12, 1e9), command=_COMMAND, devices=(("GPU 0", 3 * MIB),)), True, "a worker"
)
_OTHER = DiagnosedProcess(
    DeviceProcess(process=Process(13, 1e9), command=("x",), devices=(("GPU 0", None),)), False, "a program: `!kill 13`"
)
_KEEPER = DiagnosedProcess(DeviceProcess(process=Process(14, 1e9), command=("y",), holds_files=True), True, "a worker")


def test_a_list_says_how_to_end_them() -> None:
    bundle = Zombies(diagnosed=(_ORPHAN, _KEEPER, _OTHER)).mimebundle()

    lines = bundle["text/plain"].splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["12", "14", "13"]
    assert "3 MiB" in lines[0]
    assert "orphan: a worker" in lines[0]
    assert "keeps the device open" in lines[1]
    assert "the driver does not say" in lines[2]
    assert "left alone: a program: !kill 13" in lines[2]
    assert lines[3] == "  2 orphans (pids 12, 14, 3 MiB of device memory): %reset_gpu --zombies --yes ends them"
    assert "<script>" not in bundle["text/html"]
    assert "<code>!kill 13</code>" in bundle["text/html"]
    assert "<code>%reset_gpu --zombies --yes</code>" in bundle["text/html"]


def test_all_processes_of_a_gpu_are_listed_also_those_of_which_only_the_driver_knows() -> None:
    kernel = DeviceProcess(
        process=Process(15, 1e9),
        command=("python", "-m", "ipykernel_launcher", "-f", "/run/kernel.json"),
        devices=(("GPU 0", MIB), ("GPU 1", MIB)),
        identity=Identity(notebook="/home/anna/a.ipynb", user="anna"),
    )
    driver = (ProcessFact(15, MIB), ProcessFact(99, 2 * MIB), ProcessFact(98, None, Identity(user="anna")))
    readings = tuple(
        GpuReading(index=n, name="GPU", total=9 * MIB, used=4 * MIB, capability=None, processes=listed)
        for n, listed in enumerate((driver, driver[:1]))
    )
    text = Gpus(gpus=readings, processes=(DiagnosedProcess(kernel, False, "another user's"), _KEEPER)).mimebundle()[
        "text/plain"
    ]

    rows = [line.split(maxsplit=2) for line in text.splitlines()[-5:]]
    assert [(gpu, pid) for gpu, pid, _ in rows] == [("0", "99"), ("0", "15"), ("0", "98"), ("1", "15"), ("?", "14")]
    assert "(not visible here)" in rows[0][2]
    assert "anna: a.ipynb in /home/anna" in rows[1][2]
    assert "another user's" in rows[1][2]
    assert "processes of anna" in rows[2][2]


def test_what_became_of_them_is_said_of_each() -> None:
    text = Zombies(diagnosed=(_ORPHAN, _KEEPER), asked=True, ended=(12,), remaining=((14, "it waits"),)).mimebundle()[
        "text/plain"
    ]

    assert text.splitlines()[-2:] == ["  ended and gone: pid 12", "  still there: pid 14: it waits"]
    assert "--yes" not in text


def test_nothing_there_and_nothing_known() -> None:
    assert Zombies().mimebundle()["text/plain"] == "  no process other than this kernel was found on a GPU"
    assert "it does not answer" in Zombies(unavailable="it does not answer").mimebundle()["text/plain"]
    assert "nothing to end" in Zombies(diagnosed=(_OTHER,)).mimebundle()["text/plain"]
    interrupted = Zombies(unavailable="interrupted before", interrupted=True).mimebundle()["text/plain"]
    assert "no process" not in interrupted


def test_a_hard_cleanup_shows_host_bytes_apart_and_its_verdict() -> None:
    facts = make_facts(make_graph({"a": ["x"]}, storages={"x": 9 * MIB}), device=DeviceFacts(device="cpu", name="host memory"))
    step = Action(
        kind="workers",
        subject="2 workers of dl",
        participle="ended",
        nbytes=0,
        detail="pids 12, 13, 4 MiB of host memory",
        host=4 * MIB,
    )
    plan = Plan(
        request=Request(workers=True, hard=True),
        actions=(step, Action(kind="collect", subject="unreachable cycles", participle="collected", nbytes=0)),
    )
    outcome = Outcome(
        plan=plan,
        done=plan.actions,
        undone=(),
        realised=0,
        extra=0,
        before=9 * MIB,
        after=9 * MIB,
        host=4 * MIB,
        verdict=verdict(Analysis(facts)),
        zombies=Zombies(),
    )

    text = outcome.mimebundle()["text/plain"]
    planned = plan.mimebundle()["text/plain"]

    assert text.splitlines()[:2] == [
        "  2 workers of dl ended  pids 12, 13, 4 MiB of host memory",
        "  nothing was stale, so nothing was freed · 4 MiB of host memory given back",
    ]
    assert "this kernel still takes 9 MiB:" in text
    assert "your names  9 MiB  %reset_gpu NAME or %reset_gpu --all frees it" in text
    assert "a restart of the kernel is not needed" in text
    assert "would free 0 B · 4 MiB of host memory · nothing was touched · afterwards it lists" in planned
    data = json.loads(outcome.json_bundle()["text/plain"])
    assert data["host"] == 4 * MIB
    assert sum(part["nbytes"] for part in data["verdict"]["rest"]) == data["verdict"]["total"] == 9 * MIB
    assert outcome.mimebundle()["text/html"].count("9 MiB") >= 2
