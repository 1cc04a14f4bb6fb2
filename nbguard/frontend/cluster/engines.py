"""`nbguard.engines`: the memory of every engine of an ipyparallel cluster in one table."""

from __future__ import annotations

import math
from typing import Any

from nbguard.errors import DamagedDataError, NbguardError
from nbguard.frontend.cluster.analysis.engines import Answer, EngineMemory, EnginesReport, engine_of, report_of
from nbguard.frontend.cluster.engine import memory_facts
from nbguard.frontend.cluster.inquiry import ask, client_of


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
