"""The code that runs in an engine, which scans its own memory and answers with plain data for any version on the other side."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nbguard.errors import DamagedDataError, NbguardError
from nbguard.frontend.cluster.analysis import (
    Answer,
    EngineCleanup,
    EngineMemory,
    EnginesCleanup,
    EnginesReport,
    engine_of,
    report_of,
)
from nbguard.memory.scan.heap.kinds import name_of
from nbguard.render.markup import clean
from nbguard.training.ranks.errors import error_words


def memory_facts() -> dict[str, Any]:
    """Return the facts of `frontend.cluster.analysis.engines`: this engine's process, devices, stale bytes and last error.

    Raises:
        NoTorchError: PyTorch is not imported in this engine.
    """
    from nbguard import api

    report = api.report()
    devices = [
        {
            "device": device.device,
            "name": device.name,
            "uuid": _uuid(device.device) if device.kernel else "",
            "allocated": device.allocated,
            "reserved": None if device.total is None else sum(pool.space.reserved for pool in device.pools),
            "holder": device.holders[0].label if device.holders else "",
            "held": device.holders[0].retained if device.holders else 0,
        }
        for device in report.devices
    ]
    error = getattr(sys, "last_value", None)
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "devices": devices,
        "stale": report.stale,
        "error": error_words(error) if isinstance(error, BaseException) and not isinstance(error, NbguardError) else "",
    }


def plan_facts(targets: tuple[str, ...], choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan of a cleanup of this engine, as plain data; nothing is touched.

    Raises:
        TargetError: a target cannot be freed here.
        NoTorchError: PyTorch is not imported in this engine.
    """
    from nbguard import api

    plan = api.plan(*targets, **choices)
    steps = [action.future for action in plan.actions if action.nbytes != 0 or action.kind != "collect"]
    return {"promised": plan.promised, "steps": [*steps, *plan.skipped]}


def release_facts(targets: tuple[str, ...], choices: Mapping[str, Any]) -> dict[str, Any]:
    """Clean this engine up, and return the outcome as plain data.

    Raises:
        TargetError: a target cannot be freed here; nothing was touched.
        NoTorchError: PyTorch is not imported in this engine.
    """
    from nbguard import api

    outcome = api.release(*targets, **choices)
    steps = [action.label for action in outcome.done if action.nbytes != 0 or action.kind != "collect"]
    undone = [f"{label}: {reason}" for label, reason in outcome.undone]
    return {
        "promised": outcome.plan.promised,
        "freed": outcome.realised + outcome.extra,
        "left": outcome.after,
        "steps": [*steps, *undone, *outcome.plan.skipped],
    }


def _uuid(device: str) -> str:
    """Return the number that a GPU, or a slice of one, has in the whole world; empty where PyTorch tells none."""
    torch: Any = sys.modules["torch"]
    kind, _, index = device.partition(":")
    if kind != "cuda" or not index.isdecimal():
        return ""
    return str(getattr(torch.cuda.get_device_properties(int(index)), "uuid", ""))


# --- `nbguard.engines`: the memory of every engine of an ipyparallel cluster, asked in one question, and their cleanup.


# --- One question to all engines of an ipyparallel cluster, where each answers for itself, in time or with the reason why
# not.


_ANSWERED = Answer("answered")
_EXAMPLE = "as in  import ipyparallel; rc = ipyparallel.Client(); nbguard.engines(rc)"


def client_of(given: Any) -> Any:
    """Return the ipyparallel client of a client, or of a view of one.

    Raises:
        NbguardError: it is neither, or the cluster has no engines.
    """
    client: Any = given if is_client(given) else getattr(given, "client", None)
    if not is_client(client):
        raise NbguardError(
            f"this {name_of(type(given))} is not the client of a cluster: give an ipyparallel Client or a view, {_EXAMPLE}"
        )
    if not client.ids:
        raise NbguardError("the cluster has no engines yet; wait for them, as in  rc.wait_for_engines(2)")
    return client


def is_client(value: object) -> bool:
    """Say whether something is an ipyparallel Client, by its class alone."""
    return any(kind.__name__ == "Client" and kind.__module__.startswith("ipyparallel.") for kind in type(value).__mro__)


def clients_in(namespace: Mapping[str, object]) -> dict[str, Any]:
    """Return the clients that a notebook's names lead to, each by its first name."""
    named: dict[int, tuple[str, Any]] = {}
    for name, value in list(namespace.items()):
        if not name.startswith("_") and is_client(value):
            named.setdefault(id(value), (name, value))
    return dict(named.values())


def ask(
    client: Any, engines: Sequence[int], function: Callable[..., dict[str, Any]], *given: object, timeout: float
) -> dict[int, tuple[Answer, dict[str, Any]]]:
    """Have each engine call a function of ours, and return of each its answer and the facts that it has sent.

    An engine that has not answered in time has the question taken back: it does not act on it later.
    """
    until = time.monotonic() + timeout
    asked = {engine: client[engine].apply_async(function, *given) for engine in engines}
    client.wait(list(asked.values()), max(0.0, until - time.monotonic()))
    late = [engine for engine, result in asked.items() if not result.ready()]
    if late:
        with suppress(Exception):  # a scheduler that is gone takes nothing back, and hands nothing on
            client.abort([asked[engine] for engine in late], targets=late, block=False)
    reason = f"busy: no answer within {timeout:g} s, and the question was taken back"
    return {engine: (Answer("busy", reason), {}) if engine in late else _answer(result) for engine, result in asked.items()}


def _answer(result: Any) -> tuple[Answer, dict[str, Any]]:
    """Return the answer to a question: facts, or an error in words."""
    try:
        facts = result.get(0)
    except Exception as error:  # noqa: BLE001 - an engine's error, whatever its kind, is what there is to say of it
        name, text = getattr(error, "ename", type(error).__name__), getattr(error, "evalue", "")
        return _error(str(name), clean(str(text), 300)), {}
    if type(facts) is not dict:
        return Answer("failed", "it has another version of nbguard; install the same version there"), {}
    return _ANSWERED, facts


def _error(name: str, text: str) -> Answer:
    if name == "NoTorchError":
        return Answer("not there", "PyTorch is not imported there")
    if name in ("ModuleNotFoundError", "ImportError") and "nbguard" in text:
        return Answer("not there", "nbguard is not installed where it runs: `pip install nbguard` there")
    if name in ("EngineError", "CompositeError"):
        return Answer("failed", "it ended or lost its connection")
    return Answer("failed", f"{name}: {text}" if text else name)


def engines(client: Any, timeout: float = 10.0) -> EnginesReport:
    """Return the memory of all engines of an ipyparallel cluster: per engine its GPUs, its bytes, and the stale part.

    Engines look at themselves: nbguard must be installed where they run. One that is busy for longer than the timeout, or
    has no PyTorch, has a row that says so. Looking changes nothing.

    Args:
        client: an `ipyparallel.Client`, or a view of one.
        timeout: seconds that the engines have to answer.

    Raises:
        NbguardError: `client` is none, it has no engines, or the timeout is no positive number.
    """
    seconds = positive(timeout)
    client = client_of(client)
    answers = ask(client, client.ids, memory_facts, timeout=seconds)
    return report_of([_engine(number, answer, facts) for number, (answer, facts) in sorted(answers.items())])


def positive(timeout: object) -> float:
    """Return a timeout in seconds; raise NbguardError if it is none."""
    if type(timeout) not in (int, float) or not 0 < timeout < math.inf:  # type: ignore[operator]
        raise NbguardError(f"timeout={timeout!r} is not valid: give seconds, as in  nbguard.engines(rc, timeout=10)")
    return float(timeout)  # type: ignore[arg-type]


def _engine(number: int, answer: Answer, facts: dict[str, Any]) -> EngineMemory:
    if answer.kind != "answered":
        return EngineMemory(engine=number, answer=answer)
    try:
        return engine_of(number, facts)
    except DamagedDataError:
        return EngineMemory(
            engine=number, answer=Answer("failed", "it has another version of nbguard; install the same version there")
        )


# --- A cleanup of all engines of a cluster, where first each says its plan, then those that have one carry it out.


_TO_ACT = 60.0  # seconds that an engine has to carry out a plan: to end workers takes time


def plan_engines(
    client: Any, targets: Collection[str] = (), choices: Mapping[str, Any] | None = None, timeout: float = 10.0
) -> EnginesCleanup:
    """Return the plan of each engine of a cluster, as `nbguard.plan` makes it there; nothing is touched.

    Args:
        client: an `ipyparallel.Client`, or a view of one.
        targets: names to free in each engine; all stale memory if empty.
        choices: other arguments of `nbguard.plan`.
        timeout: seconds that the engines have to answer.

    Raises:
        NbguardError: `client` is none, or it has no engines.
    """
    client = client_of(client)
    answers = ask(client, client.ids, plan_facts, tuple(targets), dict(choices or {}), timeout=timeout)
    rows = [
        EngineCleanup(engine=engine, answer=answer, promised=facts.get("promised", 0), steps=tuple(facts.get("steps", ())))
        for engine, (answer, facts) in sorted(answers.items())
    ]
    return EnginesCleanup(engines=tuple(rows), is_done=False)


def release_engines(
    client: Any, plans: EnginesCleanup, targets: Collection[str] = (), choices: Mapping[str, Any] | None = None
) -> EnginesCleanup:
    """Have the engines that have said a plan carry it out; the others are left alone, as is one that is busy by then.

    Args:
        client: an `ipyparallel.Client`, or a view of one.
        plans: as returned by `plan_engines`.
        targets: as given to it.
        choices: likewise.

    Raises:
        NbguardError: `client` is none, or it has no engines.
    """
    client = client_of(client)
    ready = [row.engine for row in plans.engines if row.answer.kind == "answered" and row.engine in client.ids]
    answers = ask(client, ready, release_facts, tuple(targets), dict(choices or {}), timeout=_TO_ACT)
    return EnginesCleanup(
        engines=tuple(_done(row, *answers.get(row.engine, (row.answer, {}))) for row in plans.engines), is_done=True
    )


def _done(row: EngineCleanup, answer: Any, facts: Mapping[str, Any]) -> EngineCleanup:
    if answer.kind != "answered":
        return replace(row, answer=answer, promised=0, steps=())
    return replace(row, promised=facts["promised"], freed=facts["freed"], left=facts["left"], steps=tuple(facts["steps"]))
