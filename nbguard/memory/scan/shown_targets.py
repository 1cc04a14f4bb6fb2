"""Targets as a report shows them, as names, expressions, or paths that only the last scan knows."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nbguard.errors import TargetError
from nbguard.memory.core.facts import Graph, Target
from nbguard.memory.core.references.explain import explain_unheld, is_explained
from nbguard.memory.core.references.holders import unheld
from nbguard.memory.core.references.shown_paths import HOOK, is_written, targets_written
from nbguard.memory.scan.heap.kinds import mro_of, name_of
from nbguard.memory.scan.heap.walk import WeakTracker
from nbguard.memory.scan.oom.names import globals_used
from nbguard.memory.scan.parked import hooks_of
from nbguard.memory.scan.scan import Notebook, scan
from nbguard.memory.scan.targets import refuse_fixed, resolve_targets


def targets_of(texts: Iterable[str], notebook: Notebook) -> tuple[Target, ...]:
    """Return the targets of texts, in order; TargetError, before anything is touched, if one of them does not exist.

    A text that is no name or part of one is looked for among the paths of a report. These have blanks: texts that follow each
    other are read as one where only that is such a path.
    """
    return _resolved([*texts], notebook)


def with_hooks(targets: Iterable[Target], notebook: Notebook, tracker: WeakTracker) -> tuple[Target, ...]:
    """Return the targets, each name that a hook of a module uses with that hook, as the scan of `tracker` met the modules."""
    targets = tuple(targets)
    names = {target.root for target in targets if target.root == target.text and target.root in notebook.namespace}
    users = _hooks_using(names, notebook.namespace, tracker) if names else {}
    return tuple(
        replace(target, hook=users[target.root][0], hooked=users[target.root][1]) if target.root in users else target
        for target in targets
    )


def _hooks_using(names: set[str], namespace: dict[str, Any], tracker: WeakTracker) -> dict[str, tuple[str, int]]:
    """Return a hook in words and the id of its module for each of the global names that hooks of modules use."""
    used = functools.cache(lambda function: names & globals_used(function, namespace))  # one hook is often put on each layer
    found: dict[str, tuple[str, int]] = {}
    module_class = sys.modules["torch"].nn.Module
    for module in (met() for met in tracker.objects.values()):
        if module_class not in mro_of(type(module)):
            continue
        for hook in (hook for hooks in hooks_of(module) for hook in list(hooks.values())):
            function = _function_of(hook)
            if function is not None and used(function):
                words = f"the hook `{function.__name__}` of a {name_of(type(module))}"
                found |= dict.fromkeys(used(function), (words, id(module)))
    return found


def _function_of(hook: object) -> types.FunctionType | None:
    """Return the function of Python's that a hook calls; None where its own class says how it is called."""
    while type(hook) in (types.MethodType, functools.partial):
        hook = hook.__func__ if isinstance(hook, types.MethodType) else hook.func  # type: ignore[attr-defined]
    return hook if type(hook) is types.FunctionType else None


def _resolved(texts: list[str], notebook: Notebook) -> tuple[Target, ...]:
    refused: TargetError | None = None
    try:
        resolved = resolve_targets(texts, notebook.namespace, notebook.out, notebook.hidden)
    except TargetError as error:
        resolved, refused = (), error
    if "torch" not in sys.modules or (refused is None and not any(map(_may_be_a_path, resolved))):
        if refused is not None:
            raise refused
        return resolved
    facts = scan(notebook).facts
    graph, line = facts.graph, " ".join(texts)
    row = next((row for device in facts.devices for row in unheld(facts, device) if row.label == line), None)
    if row is not None and is_explained(row):
        way = explain_unheld(row).paths[0]
        raise TargetError(f"{line}: {way.advice.effect}" + (": " + way.advice.command if way.advice.command else ""))
    return tuple(target for text in joined(texts, graph) for target in _targets(text, graph, notebook))


def _may_be_a_path(target: Target) -> bool:
    """Say whether a report may mean by a text the contents of a library's class or global, not the class itself."""
    return "." in target.root or not target.root


def joined(texts: list[str], graph: Graph) -> list[str]:
    """Return the texts, those that make up one path of a report joined by blanks: the longest such first."""
    found, at = list[str](), 0
    while at < len(texts):
        ends = range(len(texts), at + 1, -1)
        end = next((end for end in ends if is_written(graph, " ".join(texts[at:end]))), at + 1)
        found.append(" ".join(texts[at:end]))
        at = end
    return found


def _targets(text: str, graph: Graph, notebook: Notebook) -> tuple[Target, ...]:
    is_of_library = any(root.kind == "library" and text.startswith(root.label) for root in graph.roots)
    try:
        resolved = resolve_targets([text], notebook.namespace, notebook.out, notebook.hidden)
    except TargetError:
        if written := targets_written(graph, text):
            return written
        raise
    if is_of_library or (not resolved[0].is_known and HOOK.search(text)):
        return targets_written(graph, text) or resolved
    refuse_fixed(text, notebook.namespace, notebook.out)
    return resolved
