"""One question to all engines of an ipyparallel cluster, where each answers for itself, in time or with the reason why not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nbguard.errors import NbguardError
from nbguard.frontend.cluster.analysis.engines import Answer
from nbguard.memory.scan.heap.kinds import name_of
from nbguard.render.words import clean

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
