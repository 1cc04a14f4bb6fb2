"""Promises of advice: bytes that lines give back together, by the graph and the plans that the commands use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from nbguard.memory.cleanup.plan.plan import Request
from nbguard.memory.cleanup.plan.planner import freed_by_targets, plan_cleanup
from nbguard.memory.core import advice
from nbguard.memory.core.advice import Advice, release_names, release_stale
from nbguard.memory.core.facts import Facts, Graph, Target
from nbguard.memory.core.processes import (
    PYTHON,
    DeviceProcess,
    DiagnosedProcess,
    Surroundings,
    basename,
    connection_of,
    is_kernel,
    is_spawned,
    script_of,
)
from nbguard.memory.core.references.explain import Why
from nbguard.memory.core.references.graph import GRAPH, Edge, nbytes_of, reach_of_roots, storages_of

# --- The diagnosis of a process on the device, which tells whether it is an orphan of a program that died.
#
# Pure. A process is an orphan only if every fact says so, and an unknown fact speaks against it. Never an orphan: this
# process,
# its ancestors and children, another user's process, a live kernel's, a program of its own. A name speaks against an
# orphan at
# most: anybody may give a program any name.


_INITS = frozenset({"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "s6-svscan", "launchd", "conmon"})
"""Programs that start no workers of Python's. Another one as the machine's first process may have started them itself."""
_JOBLIB = "joblib.externals.loky.backend.popen_loky_posix"
_MODULES = frozenset({_JOBLIB, "torch._inductor.compile_worker"})


def _may_be_kernel(command: tuple[str, ...]) -> bool:
    """Say whether a command has anything of a kernel's: another language's, another launcher's, one under a debugger."""
    return bool(connection_of(command)) or any("kernel" in word for word in command)


def diagnose(candidate: DeviceProcess, around: Surroundings) -> DiagnosedProcess:
    """Return whether `found` is an orphan that may be ended, with the reason in words."""
    if against := _protected(candidate, around) or _has_a_parent(candidate):
        return DiagnosedProcess(candidate, False, against)
    if is_kernel(candidate.command):
        is_orphan, reason = _diagnose_kernel(candidate, around)
        return DiagnosedProcess(candidate, is_orphan, reason)
    if _may_be_kernel(candidate.command):
        return DiagnosedProcess(candidate, False, "perhaps a live kernel (shut it down in Jupyter)")
    if kind := _leftover_kind(candidate.command):
        return DiagnosedProcess(candidate, True, f"{kind} whose parent died")
    return DiagnosedProcess(
        candidate,
        False,
        f"a program of its own without a parent (started with nohup?): `!kill {candidate.process.pid}` ends it",
    )


def _protected(candidate: DeviceProcess, around: Surroundings) -> str:
    """Return why a process must not be touched whatever else is known of it, or an empty string."""
    pid = candidate.process.pid
    if pid == around.pid:
        return "this kernel"
    if pid in around.ancestors:
        return "this kernel was started by it"
    if candidate.is_defunct:
        return "has ended already: only its entry is left"
    if (
        candidate.owner is None
        or not around.owner
        or set(candidate.owner) != set(around.owner)
        or len(set(candidate.owner)) != 1
    ):
        return "another user's"
    if around.pid in candidate.ancestors:
        return f"started by this kernel: {_how_it_ends(candidate, around)}"
    if candidate.is_elsewhere is not False:
        return "in another container, or it cannot be told whether it is"
    if not candidate.command:
        return "its command cannot be read"
    if not candidate.devices and not candidate.holds_files:
        return "not on a device"
    return ""


def _how_it_ends(candidate: DeviceProcess, around: Surroundings) -> str:
    """Return in words the kind of a process that this kernel started, and the way to end it."""
    if candidate.process.pid in around.workers:
        return "a DataLoader's worker (" + advice.end_workers().code + " ends it when it is idle)"
    if _JOBLIB in candidate.command:
        return "joblib's worker (" + advice.end_joblib_workers().code + " ends it)"
    return "an executor's `shutdown()` ends its workers, a pool's `terminate()`"


def _has_a_parent(candidate: DeviceProcess) -> str:
    """Return whose child a process is, if it is anybody's but an adopter's."""
    if candidate.is_parent_gone:
        return ""
    if candidate.parent_command is None or not candidate.parent_command or not candidate.ancestors:
        return "its parent cannot be read"
    if candidate.is_adopted:
        return ""
    program = basename(candidate.parent_command[0])
    if candidate.ancestors[0] == 1 and program in _INITS:
        return f"this container's first process ({program}) may have started it" if candidate.is_contained else ""
    what = "a live kernel" if is_kernel(candidate.command) and not candidate.is_forked else "its parent lives"
    return f"{what} (parent {candidate.ancestors[0]}, {program})"


def _diagnose_kernel(candidate: DeviceProcess, around: Surroundings) -> tuple[bool, str]:
    """Diagnose a process that runs a kernel's program and that nobody but an adopter is the parent of."""
    connection = connection_of(candidate.command)
    if candidate.is_forked:
        if candidate.is_session_leader is not False:
            return False, "a live kernel, or it cannot be told from one"
        for kernel in around.kernels:
            if kernel.connection == connection and kernel.process.started <= candidate.process.started:
                return False, f"of a live kernel (pid {kernel.process.pid})"
        return True, "forked by a dead kernel"
    if candidate.is_forked is None or candidate.connection is not False:
        return False, "a live kernel: its connection file is there (shut it down in Jupyter)"
    if candidate.has_clients is not False:
        return False, "a live kernel: somebody is connected to it"
    return True, "a kernel whose server and connection file are gone"


def _leftover_kind(command: tuple[str, ...]) -> str:
    """Return in words the helper that a command starts, if it makes no sense without its parent; else an empty string."""
    if not command or not PYTHON.match(basename(command[0])):
        return ""
    for option, word in pairwise(command[1:9]):
        if option == "-c" and is_spawned(word):
            return "a multiprocessing worker"
        if option == "-m" and word in _MODULES:
            return "a worker process"
    program = script_of(command)
    return "a torch.compile worker" if program.replace("\\", "/").endswith("_inductor/compile_worker/__main__.py") else ""


_NEEDING = frozenset({"learner", "model"})
"""Kinds of objects that are broken without their contents."""
_FEW = 4
"""Most lines that are each checked for being needed."""


def promised(facts: Facts, lines: Sequence[Advice]) -> int | None:
    """Return the bytes that these lines give back, run one after the other; None where that is not known.

    It is not where the effect of a line is not known, or where a line frees all that is stale and more is about to become so.
    """
    if release_stale() in lines and any(root.is_ending for root in facts.graph.roots):
        return None
    freed = freed_by(facts, lines)
    return None if freed is None else nbytes_of(facts.graph, freed)


def freed_by(facts: Facts, lines: Sequence[Advice]) -> set[int] | None:
    """Return the storages that these lines free, run one after the other; None where the effect of one is not known.

    Cycles that wait for the collector already are none of the lines' doing, whoever collects them; they count only where a line
    frees all that is stale, or has them collected because they keep its memory.
    """
    cleans_up = release_stale() in lines
    code = [line for line in lines if not line.targets and line != release_stale()]
    if not all(line.cut or line.ends for line in code):
        return None
    graph = facts.graph
    left = _without(graph, code)
    targets = tuple(target for line in lines for target in _targets(graph, line))
    freed = freed_by_targets(replace(facts, graph=left), targets) if targets else frozenset[int]()
    if cleans_up:
        left = _without(left, [line for line in lines if line.targets])
        freed |= plan_cleanup(replace(facts, graph=left), Request()).storages
    return _held(graph, cleans_up) - (_held(left, cleans_up) - freed) | freed


def needed(facts: Facts, lines: list[Advice]) -> list[Advice]:
    """Return the lines without those that add nothing to the others; names are spared first. Of many, all."""
    if len(lines) > _FEW or not (nbytes := promised(facts, lines)):
        return lines
    for line in sorted(lines, key=lambda line: not line.targets):
        others = [other for other in lines if other is not line]
        if others and promised(facts, others) == nbytes:
            lines = others
    return lines


def joined(lines: list[Advice]) -> tuple[Advice, ...]:
    """Return the lines in the order of their work: Python, one cleanup with all targets, then the stale rest."""
    targets = tuple(text for line in lines for text in line.targets)
    code = (line for line in lines if not line.targets and line != release_stale())
    stale = (line for line in lines if line == release_stale())
    return (*code, *((release_names(targets),) if targets else ()), *stale)


def with_release(facts: Facts, why: Why) -> Why:
    """Return an explanation with the lines that let go of the thing together, and the bytes that they give back.

    A graph that shares its memory goes along where nothing is free otherwise; nothing else that only shares it does. There
    are no lines where one of the ways cannot be cut by a line, or leads through a model that is not all that has the thing.
    """
    graph, own = facts.graph, [path for path in why.paths if not path.storages_only]
    kinds = {root.label: root.kind for root in graph.roots}
    models = {root.label for root in graph.roots if any(graph.nodes[node].kind in _NEEDING for node in root.nodes)}
    if len({path.steps[0] for path in own}) > 1 and any(path.steps[0] in models and len(path.steps) > 1 for path in own):
        return why
    sharing = [path for path in why.paths if path.storages_only and GRAPH in path.text and path.steps[0] not in models]
    for paths in filter(None, (own, [*own, *sharing] if sharing else [])):
        lines = dict[str, Advice]()
        for path in paths:
            if kinds.get(path.steps[0]) == "frame" or not path.advice.is_code:
                return why
            lines[path.advice.command] = path.advice
        for label, _ in why.more:
            if kinds.get(label) != "name":
                return why
            parts = (f"{label}.", f"{label}[")
            lines = {key: line for key, line in lines.items() if not any(f"{text}.".startswith(parts) for text in line.targets)}
            lines[label] = release_names((label,))
        chosen = needed(facts, list(lines.values()))
        frees = promised(facts, chosen)
        if chosen and frees != 0:
            return replace(why, release=joined(chosen), released=frees)
    return why


def _held(graph: Graph, collects: bool) -> set[int]:
    """Return the storages that something holds; cycles that wait for the collector count with `collects` only."""
    roots = (n for n, root in enumerate(graph.roots) if collects or root.kind != "garbage")
    return storages_of(graph, reach_of_roots(graph, roots))


def _without(graph: Graph, lines: Sequence[Advice]) -> Graph:
    """Return the graph without the references and the roots that these lines take away."""
    cut = frozenset[Edge]().union(*(line.cut for line in lines))
    gone = {line.ends for line in lines} | {text for line in lines if not line.cut for text in line.targets}
    nodes = list(graph.nodes)
    for parent in {parent for parent, _ in cut}:
        kept = [(child, label) for child, label in nodes[parent].references if (parent, child) not in cut]
        children, labels = tuple(child for child, _ in kept), tuple(label for _, label in kept)
        nodes[parent] = replace(nodes[parent], children=children, labels=labels)
    return replace(graph, nodes=tuple(nodes), roots=tuple(root for root in graph.roots if root.label not in gone))


def _targets(graph: Graph, line: Advice) -> Iterator[Target]:
    """Yield a cleanup's version of the targets of a line: roots, or the references that it removes."""
    if not line.targets:
        return
    for parent, child in line.cut:
        text = f"{line.targets[0]} {parent} {child}"
        yield Target(text=text, containers=(graph.nodes[parent].ref,), value=graph.nodes[child].ref)
    if not line.cut:
        yield from (Target(text=text, root=text) for text in line.targets)
