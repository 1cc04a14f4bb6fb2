"""nbguard from Python: the same as the magics, for scripts, notebooks and ranks. `report`, `why`, `plan`, `release`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from nbguard.actions.release import apply, uncover
from nbguard.core.cleanup import plan_cleanup
from nbguard.core.facts import Graph
from nbguard.core.plan import Outcome, Plan, Request
from nbguard.core.report import Report, build_report
from nbguard.core.why import Why, explain
from nbguard.errors import TargetError
from nbguard.probes.describe import describe
from nbguard.probes.kinds import Kinds
from nbguard.probes.look import Look, Notebook, look
from nbguard.probes.targets import lookup, output_label, parse_target, resolve_targets


def report(namespace: dict[str, Any] | None = None) -> Report:
    """Return who holds the device memory of this process.

    Args:
        namespace: the names to report by; the notebook's, or the script's `__main__`, if not given.

    Raises:
        NoTorchError: PyTorch is not imported yet.
    """
    return build_report(look(Notebook.current(namespace)).facts)


def why(name: str, namespace: dict[str, Any] | None = None) -> Why:
    """Return the reference paths that keep `name` (whatever `del` accepts, or `Out[3]`), or the memory behind it, alive.

    Raises:
        TargetError: there is no such thing, or it leads to no device memory.
        NoTorchError: PyTorch is not imported yet.
    """
    notebook = Notebook.current(namespace)
    target = parse_target(name)
    label = output_label(target, notebook.out)
    value = notebook.out[int(label[4:-1])] if label else lookup(target, notebook.namespace)
    ref, what = id(value), describe(value, Kinds())
    del value
    facts = look(notebook).facts
    return explain(facts, name, _node_of(facts.graph, ref, name, facts.tracked), what)


def _node_of(graph: Graph, ref: int, name: str, tracked: str) -> int:
    for number, node in enumerate(graph.nodes):
        if node.ref == ref:
            return number
    raise TargetError(f"{name} leads to no tensor, model or loader on {tracked}: nothing to explain (%gpumem lists what does)")


def plan(*targets: str, keep: Iterable[str] = (), everything: bool = False, namespace: dict[str, Any] | None = None) -> Plan:
    """Return what `release` with the same arguments would do, with the bytes it promises. Touches nothing."""
    notebook = Notebook.current(namespace)
    return _plan(notebook, _request(notebook, targets, keep, everything))[0]


def release(
    *targets: str, keep: Iterable[str] = (), everything: bool = False, namespace: dict[str, Any] | None = None
) -> Outcome:
    """Free what is stale, or just `targets`, and return what really came back.

    Args:
        targets: what to free, each as one would write it after `del`; the names are deleted. None: all that is stale.
        keep: names (with `everything`) or displayed results (`Out[3]`) that must stay.
        everything: free every name that leads to device memory.
        namespace: as in `report`.

    Raises:
        TargetError: a target does not exist; nothing has been touched.
        NoTorchError: PyTorch is not imported yet.
    """
    notebook = Notebook.current(namespace)
    request = _request(notebook, targets, keep, everything)
    uncovered = uncover()
    planned, seen = _plan(notebook, request)
    return apply(planned, notebook, seen, uncovered)


def _request(notebook: Notebook, targets: Iterable[str], keep: Iterable[str], everything: bool) -> Request:
    """Return what is asked for, each name looked up; raise TargetError for one that does not exist."""
    keep = tuple(keep)
    for name in keep:
        if not output_label(parse_target(name), notebook.out):
            lookup(ast.parse(name, mode="eval").body, notebook.namespace)
    found = resolve_targets(targets, notebook.namespace, notebook.out, notebook.hidden)
    return Request(found, keep, everything)


def _plan(notebook: Notebook, request: Request) -> tuple[Plan, Look]:
    seen = look(notebook)
    return plan_cleanup(seen.facts, request), seen
